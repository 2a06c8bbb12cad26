// Connects the ranks of an NCCL group.
#ifndef COMM_NCCL_NCCL_CONNECT_H_
#define COMM_NCCL_NCCL_CONNECT_H_

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/nccl/nccl_handle.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Joins the group of `world_size` ranks that meet in `store`, with a GPU each.
absl::StatusOr<std::unique_ptr<NcclHandle>> ConnectNccl(
    const c10::intrusive_ptr<c10d::Store>& store, c10::Device device, int rank,
    int world_size, absl::Time deadline);

// Gives all ranks of a group a window, or none.

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

#endif  // COMM_NCCL_NCCL_CONNECT_H_
