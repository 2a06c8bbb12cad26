// Ranks that are processes or threads with a GPU each, over NCCL.
#ifndef COMM_NCCL_NCCL_COMMUNICATOR_H_
#define COMM_NCCL_NCCL_COMMUNICATOR_H_

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// What AllocateSymmetric() does with memory, in groups of several ranks; one
// rank alone gets plain memory. It becomes a window of the group that it is
// asked of, be it a sub-group, and of no other. Where NCCL refuses one rank a
// window, all go on without.
//
// NCCL's symmetric kernels gather everything and sum floating-point numbers of
// up to 32 bits, without a factor, between GPUs that reach each other's memory.
// Up to 2.28 both buffers have to be in symmetric windows; from 2.29.7 on the
// output of an all-gather is enough, and the input of a reduce-scatter.
enum class NcclWindows {
  // Nothing: it is of LibTorch's allocator.
  kNone,
  // Registers it with NCCL, which saves copies; as a symmetric window, which
  // NCCL has its fastest kernels for, where those can be aborted: from NCCL
  // 2.29.7 on.
  kAbortable,
  // As a symmetric window from 2.27 on. Before 2.29.7 a kernel whose peer has
  // died runs for ever: the rank gets its error ten seconds later, nothing else
  // runs on its device any more, and only a signal ends it.
  kSymmetric,
};

// The same on all ranks, but for the device.
struct NcclOptions {
  // Communicator::default_timeout; also for all ranks to appear.
  absl::Duration timeout = absl::Minutes(5);
  // How long a failed rank asks the others what they know.
  absl::Duration diagnosis_timeout = absl::Seconds(2);
  // Index of this rank's GPU; unset: the current one of the calling thread.
  std::optional<int> device;
  NcclWindows windows = NcclWindows::kAbortable;
};

// One rank of a group of `world_size` that meet in `store`, which no other
// group uses. Blocks until all have come; errors:
//   FailedPrecondition  there is no GPU or driver
//   DeadlineExceeded    a rank has not come
//   InvalidArgument     two ranks use one GPU
//
// Takes tensors on its GPU. An operation runs on the group's own stream of high
// priority, behind what the stream that was current when it was called had been
// given; Work::BlockCurrentStream() makes the then current stream wait for it,
// and Work::Wait() the host. A Work that has been neither waited for nor made a
// stream wait hands its tensors to the group when it is dropped; after
// BlockCurrentStream() they are the caller's, to be freed or used in the order
// of that stream. Sums are in NCCL's order: the same bits every time on the
// same ranks, not those of other backends.
//
// Calls are made in the calling thread, by a blocking communicator. The first
// operations of a kind connect the ranks, so they make the host wait for the
// peers, like all that comes when the device's queue is full: the deadline ends
// that, too.
//
// In a capture (Communicator::CanBeCaptured) operations follow the stream that
// is captured, which may be in any mode. Graphs are destroyed before the
// communicator, and after Abort() before anything else is expected of the
// device: NCCL frees nothing that a graph refers to.
//
// NCCL cannot see that ranks' calls differ: those run into the deadline. A
// thread looks for that and for NCCL's own errors; the first failure aborts the
// group, reaches the peers through the store, and is what all later calls
// return. Destroying a communicator waits a few seconds until its operations
// are done, and as long until the peers on its host have left, too; then it
// aborts what is left of them. Memory of AllocateSymmetric() goes first: later
// it cannot be given back.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const NcclOptions& options = {});

// NCCL as the device's backend of Connect():
//
//   fsdp::comm::ConnectOptions options;
//   options.device = fsdp::comm::NcclBackend();

// Rank r of a host takes GPU r modulo their number where `options` names none;
// it becomes the current one of the thread that connects, for LibTorch goes
// back to the current one and would set it up. The timeout is ConnectOptions'.
ConnectDevice NcclBackend(const NcclOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_COMMUNICATOR_H_
