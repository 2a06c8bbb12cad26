// A communicator of processes or threads with a GPU each, over NCCL.
#ifndef COMM_NCCL_NCCL_COMMUNICATOR_H_
#define COMM_NCCL_NCCL_COMMUNICATOR_H_

#include <c10/util/intrusive_ptr.h>

#include <optional>

#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// The kind of memory of AllocateSymmetric() in groups of several ranks. (A
// single rank gets plain memory.) Memory becomes a window of the group, or
// sub-group, whose method is called, and of no other. If NCCL refuses one rank
// a window, all go on without.
//
// For symmetric windows NCCL has its fastest kernels, between GPUs that reach
// each other's memory. They gather all dtypes and sum floating-point numbers of
// up to 32 bits, without a factor. Up to NCCL 2.28 both buffers have to be in
// symmetric windows. From 2.29.7 on the output of an all-gather and the input
// of a reduce-scatter are enough.
enum class NcclWindows {
  // Uses LibTorch's allocator.
  kNone,
  // Registers memory with NCCL, which saves copies. From NCCL 2.29.7 on, which
  // can abort symmetric kernels, it is a symmetric window.
  kAbortable,
  // Makes a symmetric window from NCCL 2.27 on. Before 2.29.7 a kernel whose
  // peer has died runs for ever: the rank gets its error ten seconds later,
  // nothing else runs on its device any more, and only a signal ends it.
  kSymmetric,
};

// Options of a group over NCCL. All ranks pass the same, except the device.
struct NcclOptions {
  // Communicator::default_timeout(), and how long all ranks may take to come.
  absl::Duration timeout = absl::Minutes(5);
  // A failed rank asks the others for this long what they know.
  absl::Duration diagnosis_timeout = absl::Seconds(2);
  // The index of this rank's GPU; by default the calling thread's current one.
  std::optional<int> device;
  NcclWindows windows = NcclWindows::kAbortable;  // for AllocateSymmetric()
};

// Returns one rank's end of a group of `world_size` ranks that meet in `store`,
// which no other group uses. Blocks until all have come. Errors:
//   FailedPrecondition  there is no GPU or driver
//   DeadlineExceeded    a rank has not come
//   InvalidArgument     two ranks use one GPU
//
// The group takes tensors on its GPU. An operation runs on the group's own
// stream of high priority, after all work of the stream that was current at the
// call. Work::BlockCurrentStream() makes the current stream wait for it, and
// Work::Wait() the host. After BlockCurrentStream() the tensors are the
// caller's, to be freed or used in the order of that stream. A Work on which
// neither was called hands its tensors to the group when it is destroyed. Sums
// are in NCCL's order: the same ranks get the same bits every time, but other
// ones than with other backends.
//
// The calling thread calls NCCL, which blocks. The first operations of a kind
// connect the ranks, so the host waits for the peers. It also waits when the
// device's queue is full. The deadline ends these waits, too.
//
// In a capture (Communicator::CanBeCaptured()) operations follow the captured
// stream, in any mode of capture. Destroy graphs before the communicator, and
// after Abort() before anything else uses the device: NCCL frees nothing that a
// graph refers to.
//
// NCCL cannot see that ranks' calls differ: they run into the deadline. A
// thread looks for missed deadlines and for NCCL's own errors. The first
// failure aborts the group, reaches the peers by the store, and is returned by
// all later calls. The destructor of a communicator waits a few seconds for its
// operations, and as long for the peers of its host to leave, too; then it
// aborts the rest. Free memory of AllocateSymmetric() before: later it cannot
// be given back.
CreatedCommunicator CreateNcclCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const NcclOptions& options = {});

// Makes NCCL the device's backend of Connect():
//
//   fsdp::comm::ConnectOptions options;
//   options.device = fsdp::comm::NcclBackend();
//
// If `options` names no GPU, rank r of a host takes GPU r modulo their number.
// Make it the current one of threads that train: LibTorch returns to the
// current GPU, and would initialise that one too. The timeout is
// that of ConnectOptions.
ConnectDevice NcclBackend(const NcclOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_COMMUNICATOR_H_
