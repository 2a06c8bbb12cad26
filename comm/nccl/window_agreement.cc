#include "comm/nccl/window_agreement.h"

#include "base/status_macros.h"

namespace fsdp::comm {

absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps) {
  FSDP_ASSIGN_OR_RETURN(const bool is_allocated,
                        steps.true_on_all(steps.allocate().ok()));
  if (!is_allocated) return WindowOutcome::kNoMemory;
  absl::Status registered = steps.register_window();
  // The other ranks may still be in register_window().
  if (absl::IsAborted(registered) || absl::IsDeadlineExceeded(registered)) {
    return registered;
  }
  FSDP_ASSIGN_OR_RETURN(const bool is_registered,
                        steps.true_on_all(registered.ok()));
  return is_registered ? WindowOutcome::kWindow : WindowOutcome::kRefused;
}

}  // namespace fsdp::comm
