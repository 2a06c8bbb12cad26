#include "comm/testing/ranks_in_threads.h"

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"
#include "comm/testing/ranks_of_one_host.h"

namespace fsdp::comm::testing {

ConnectOptions Options(absl::Duration connect_timeout) {
  ConnectOptions options;
  options.connect_timeout = connect_timeout;
  options.timeout = kLimit;
  return options;
}

absl::Status RunInThreads(int num_threads,
                          const std::function<absl::Status(int)>& fn,
                          std::vector<absl::Status>* results) {
  results->resize(num_threads);
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] { (*results)[i] = fn(i); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : *results) FSDP_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

std::vector<absl::Status> ConnectAll(const std::vector<Environment>& ranks,
                                     const ConnectOptions& options) {
  std::vector<absl::Status> results;
  RunInThreads(
      static_cast<int>(ranks.size()),
      [&](int i) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                              Connect(ranks[i], options));
        if (communicator->default_timeout() != options.timeout) {
          return absl::InternalError("the timeout is wrong");
        }
        return SumRanks(*communicator);
      },
      &results)
      .IgnoreError();
  return results;
}

}  // namespace fsdp::comm::testing
