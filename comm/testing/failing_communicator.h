// A communicator that fails when the test wants it to.
#ifndef COMM_TESTING_FAILING_COMMUNICATOR_H_
#define COMM_TESTING_FAILING_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// Says which of a rank's collectives fails, and how. The communicator is then
// aborted, as after any failure, so that the peers fail, too.
struct FailurePlan {
  // One of these is set, or both: the `nth` call of `label`, from 0, fails.
  std::optional<int64_t> nth;
  std::optional<std::string> label;

  absl::Status error = absl::UnavailableError("injected failure");

  enum class Moment {
    kStart,  // the call itself fails, before the peers see it
    kWait,   // the call enters `base` and moves its data; Wait() fails
  };
  Moment moment = Moment::kStart;
};

// Returns a communicator that passes all calls on to `base` until one fits
// `plan`.
std::unique_ptr<Communicator> FailOnPlan(std::unique_ptr<Communicator> base,
                                         FailurePlan plan);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_FAILING_COMMUNICATOR_H_
