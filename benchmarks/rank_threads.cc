#include "benchmarks/rank_threads.h"

#include <ATen/Parallel.h>

#include <functional>
#include <thread>
#include <vector>

namespace fsdp {

void OnAllRanks(int ranks, const std::function<void(int)>& fn) {
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&fn, rank] {
      at::set_num_threads(1);
      fn(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace fsdp
