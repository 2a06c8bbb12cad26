// Gives all ranks of a group a window, or none.
#ifndef COMM_NCCL_WINDOW_AGREEMENT_H_
#define COMM_NCCL_WINDOW_AGREEMENT_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp::comm {

// The steps of one rank.
struct WindowSteps {
  absl::FunctionRef<absl::Status()> allocate;
  // Collective among ranks that have allocated. Aborted and DeadlineExceeded
  // end the group; other errors do it no harm.
  absl::FunctionRef<absl::Status()> register_window;
  // Collective. Returns true if `mine` is true on every rank.
  absl::FunctionRef<absl::StatusOr<bool>(bool mine)> true_on_all;
};

enum class WindowOutcome {
  kWindow,
  kNoMemory,  // a rank could not allocate this window
  kRefused,   // NCCL refused a rank, and would refuse other windows, too
};

// Collective. All ranks return the same, except errors, which end the group.
absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_WINDOW_AGREEMENT_H_
