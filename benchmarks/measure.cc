#include "benchmarks/measure.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"

namespace fsdp {

double Seconds(const std::function<void()>& fn) {
  const absl::Time begin = absl::Now();
  fn();
  return absl::ToDoubleSeconds(absl::Now() - begin);
}

double Median(std::vector<double> values) {
  FSDP_CHECK(!values.empty());
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double MedianRatio(const std::vector<double>& over,
                   const std::vector<double>& under) {
  std::vector<double> ratios;
  ratios.reserve(over.size());
  for (size_t i = 0; i < over.size(); ++i) ratios.push_back(over[i] / under[i]);
  return Median(std::move(ratios));
}

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

std::string DirectoryIn(const char* variable) {
  const char* const directory = std::getenv(variable);
  return directory != nullptr ? directory : "/var/tmp";
}

}  // namespace fsdp
