// Runs the ranks of benchmarks as threads.
#ifndef BENCHMARKS_RANK_THREADS_H_
#define BENCHMARKS_RANK_THREADS_H_

#include <functional>

namespace fsdp {

// Runs `fn` for ranks 0 to `ranks` - 1, each in a thread that computes alone.
void OnAllRanks(int ranks, const std::function<void(int)>& fn);

}  // namespace fsdp

#endif  // BENCHMARKS_RANK_THREADS_H_
