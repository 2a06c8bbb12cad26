// Lets a program fail at each of the points that it passes.
#ifndef FSDP_TESTING_FAULT_INJECTOR_H_
#define FSDP_TESTING_FAULT_INJECTOR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace fsdp::testing {

// The error of a point that fails.
enum class FaultType {
  kStatus,  // DataLoss: returned where that is possible, else a StatusError
  kUsers,   // a UsersError
  kTorch,   // a c10::Error
};

std::ostream& operator<<(std::ostream& out, FaultType type);

// Belongs to one rank and is used by its thread.
class FaultInjector {
 public:
  static constexpr char kAllocation[] = "an allocation";

  // Lets a point fail: number `point`, counted from here, of those that have
  // `part` in their name.
  void Arm(int64_t point, FaultType type, absl::string_view part = "");
  void Disarm() { armed_ = false; }

  // Returns the point that has failed since Arm(), or "" if the program did not
  // reach it.
  const std::string& failed_at() const { return failed_at_; }
  // Returns whether the failure was inside a backward.
  bool failed_in_backward() const { return failed_in_backward_; }
  // Returns a part of the error's text.
  std::string text() const;

  // Passes a point in code that cannot return a Status.
  void Pass(absl::string_view point);
  // Passes a point in code that returns a Status, but may throw as well.
  absl::Status PassOrReturn(absl::string_view point);
  // Passes a point in code that never throws; only kStatus fails there.
  absl::Status PassNoThrow(absl::string_view point);

  // Returns `x` and passes three points: now, in a tensor's hook, and in the
  // backward of a custom autograd function.
  at::Tensor Pass(absl::string_view point, const at::Tensor& x);

 private:
  bool Fails(absl::string_view point);

  bool armed_ = false;
  int64_t countdown_ = 0;
  std::string part_;
  FaultType type_ = FaultType::kStatus;
  std::string failed_at_;
  bool failed_in_backward_ = false;
};

// Passes a point before everything that `base` and its sub-groups do, and
// before a wait returns. If `aborts`, a failure aborts `base`, as its own
// failures do. `injector` must outlive the result.
std::unique_ptr<comm::Communicator> InjectFaults(
    std::unique_ptr<comm::Communicator> base, FaultInjector* injector,
    bool aborts);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_FAULT_INJECTOR_H_
