// Lets a program fail at any of the points that it passes, one after the other.
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

// What a point fails with.
enum class FaultType {
  kStatus,  // DataLoss: returned where that is possible, else a StatusError
  kUsers,   // a UsersError
  kTorch,   // a c10::Error
};

std::ostream& operator<<(std::ostream& out, FaultType type);

// Of one rank, and used by its thread.
class FaultInjector {
 public:
  static constexpr char kAllocation[] = "an allocation";

  // The point number `point` of those with `part` in their name, counted from
  // here, fails.
  void Arm(int64_t point, FaultType type, absl::string_view part = "");
  void Disarm() { armed_ = false; }

  // Where it has failed since Arm(): empty if the program did not get there.
  const std::string& failed_at() const { return failed_at_; }
  // Whether that was inside a backward.
  bool failed_in_backward() const { return failed_in_backward_; }
  // A part of what the error says.
  std::string text() const;

  // A point in code that cannot return a Status.
  void Pass(absl::string_view point);
  // A point in code that can, but may throw as well.
  absl::Status PassOrReturn(absl::string_view point);
  // A point in code that never throws: passed only where kStatus is armed.
  absl::Status PassNoThrow(absl::string_view point);

  // `x` after three points: now, in a tensor's hook, and in the backward of a
  // custom autograd function.
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
// before a wait for it returns. `aborts`: failing aborts `base`, as failures of
// its own do. `injector` outlives the result.
std::unique_ptr<comm::Communicator> InjectFaults(
    std::unique_ptr<comm::Communicator> base, FaultInjector* injector,
    bool aborts);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_FAULT_INJECTOR_H_
