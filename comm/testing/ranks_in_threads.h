// Ranks that are threads and connect by Connect(). (Those of
// run_ranks_test.cc are processes.)
#ifndef COMM_TESTING_RANKS_IN_THREADS_H_
#define COMM_TESTING_RANKS_IN_THREADS_H_

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/startup/environment.h"

namespace fsdp::comm::testing {

inline constexpr absl::Duration kLimit = absl::Seconds(30);

ConnectOptions Options(absl::Duration connect_timeout = kLimit);

// Runs fn(i) on each thread i, writes `results` and returns the first error.
absl::Status RunInThreads(int num_threads,
                          const std::function<absl::Status(int)>& fn,
                          std::vector<absl::Status>* results);

// Connects all ranks, adds their numbers up and returns their results.
std::vector<absl::Status> ConnectAll(const std::vector<Environment>& ranks,
                                     const ConnectOptions& options);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RANKS_IN_THREADS_H_
