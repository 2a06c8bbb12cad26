// Device memory that NCCL can use without copies.
#ifndef COMM_NCCL_NCCL_MEMORY_H_
#define COMM_NCCL_NCCL_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/nccl/nccl_group.h"

namespace fsdp::comm {

// True if the NCCL that this process runs with has windows (2.27).
bool HasNcclWindows();
// True if ncclCommAbort() also ends kernels of symmetric windows (2.29.7, from
// which on their barriers in NCCL's source look at the flag of an abort).
bool HasAbortableNcclWindows();

// Memory of ncclMemAlloc(). The destructor frees it: it waits for the device,
// up to the group's timeout, or a few seconds if the group has failed. Memory
// that is in use for longer is never freed.
class NcclMemory {
 public:
  // Allocates `bytes` > 0 on the group's device. ResourceExhausted: NCCL cannot
  // allocate them.
  static absl::StatusOr<std::shared_ptr<NcclMemory>> Allocate(
      std::shared_ptr<NcclGroup> group, int64_t bytes);
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  // Makes it a window of the group. Collective: all ranks have HasNcclWindows()
  // and pass the same `is_symmetric`. It does nothing on a machine that does
  // not gain from windows. Errors are those of NcclHandle::Call(): if NCCL
  // refuses the window, the group can still be used.
  absl::Status Register(bool is_symmetric);

  // Returns all of it as uint8. The tensor keeps `memory` alive.
  static at::Tensor AsTensor(const std::shared_ptr<NcclMemory>& memory);

 private:
  NcclMemory(std::shared_ptr<NcclGroup> group, void* data, int64_t bytes);

  const std::shared_ptr<NcclGroup> group_;
  void* const data_;
  const int64_t bytes_;
  // NCCL writes to it as long as a registration is in progress.
  const std::shared_ptr<ncclWindow_t> window_;
};

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

// Gives all ranks of a group a window, or none. Collective. All ranks return
// the same, except errors, which end the group.
absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_MEMORY_H_
