// Runs seeds in several processes beside each other.
#ifndef TESTING_SIMULATION_WORKERS_H_
#define TESTING_SIMULATION_WORKERS_H_

#include <cstdint>
#include <functional>
#include <limits>

#include "absl/time/time.h"
#include "testing/simulation/seed_run.h"

namespace fsdp::simulation {

struct WorkersOptions {
  int jobs = 1;
  // Seeds from `first` on, in order, to `end` exclusive or until a time.
  int64_t first = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
  absl::Time until = absl::InfiniteFuture();
  // A seed that takes longer is a problem.
  absl::Duration longest = absl::Minutes(5);

  // Is called in one of the processes.
  std::function<SeedResult(int64_t seed)> simulate;
  // Is called in this process, in any order, without the result's log; false:
  // no further seeds begin.
  std::function<bool(int64_t seed, const SeedResult& result)> take;
};

// Each process has its own core while there are enough. A process that crashes
// or runs for too long is the problem of its seed, and another one goes on.
// This process may not have threads.
void RunWorkers(const WorkersOptions& options);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_WORKERS_H_
