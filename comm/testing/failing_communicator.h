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

// Which of a rank's collectives fails, and how. The communicator is aborted
// then, as after any failure, so that the peers fail as well.
struct FailurePlan {
  // At least one of the two; both: the `nth` call of `label`. From 0.
  std::optional<int64_t> nth;
  std::optional<std::string> label;

  absl::Status error = absl::UnavailableError("injected failure");

  enum class Moment {
    kStart,  // the call itself fails, before the peers see it
    kWait,   // the call enters `base` and moves its data; Wait() fails
  };
  Moment moment = Moment::kStart;
};

// Passes everything on to `base` until a call fits `plan`.
std::unique_ptr<Communicator> FailOnPlan(std::unique_ptr<Communicator> base,
                                         FailurePlan plan);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_FAILING_COMMUNICATOR_H_
