// How all ranks of a group come to have a window, or all do without.
#ifndef COMM_NCCL_WINDOW_AGREEMENT_H_
#define COMM_NCCL_WINDOW_AGREEMENT_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp::comm {

// What a rank does by itself, and how it learns of the others.
struct WindowSteps {
  absl::FunctionRef<absl::Status()> allocate;
  // Collective among ranks that have allocated. What it refuses does no harm;
  // Aborted and DeadlineExceeded are the end of the group.
  absl::FunctionRef<absl::Status()> register_window;
  // Whether `mine` is true on every rank.
  absl::FunctionRef<absl::StatusOr<bool>(bool mine)> true_on_all;
};

enum class WindowOutcome {
  kWindow,
  kNoMemory,  // of a rank, for this window
  kRefused,   // to a rank: others will be, too
};

// The same on all ranks, but for errors, which are the end of the group.
absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_WINDOW_AGREEMENT_H_
