#include "checkpoint/run/together.h"

#include "absl/time/clock.h"
#include "base/torch_status.h"
#include "comm/agreement.h"

namespace fsdp::checkpoint {

absl::Status Caught(absl::string_view what,
                    absl::FunctionRef<absl::Status()> act) {
  return TorchToStatus(what, act);
}

absl::Time Together::Deadline() const { return absl::Now() + timeout_; }

absl::Status Together::Agree(const absl::Status& mine) const {
  if (ranks_ == nullptr) return mine;
  return comm::Agree(*ranks_, mine, what_, Deadline());
}

absl::Status Together::CheckSame(const std::string& text,
                                 absl::string_view of) const {
  if (ranks_ == nullptr) return absl::OkStatus();
  return comm::CheckSame(*ranks_, text, of, Deadline());
}

}  // namespace fsdp::checkpoint
