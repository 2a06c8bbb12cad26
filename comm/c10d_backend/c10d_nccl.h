// LibTorch's own ProcessGroupNCCL as a communicator, where nccl_communicator.h,
// which calls NCCL itself, is not wanted:
//
//   fsdp::comm::ConnectOptions options;
//   options.device = fsdp::comm::C10dNcclBackend();
#ifndef COMM_C10D_BACKEND_C10D_NCCL_H_
#define COMM_C10D_BACKEND_C10D_NCCL_H_

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

struct C10dNcclOptions {
  // Communicator::default_timeout; also for all ranks to appear.
  absl::Duration timeout = absl::Minutes(5);
  // How long a failed rank asks the others what they know.
  absl::Duration diagnosis_timeout = absl::Seconds(2);
  // Index of this rank's GPU; unset: the current one of the calling thread.
  std::optional<int> device;
};

// One rank of a group of `world_size` that meet in `store`, which no other
// group uses, over a ProcessGroupNCCL of its own, as
// CreateC10dBackendCommunicator() describes. Blocks until all have come, with
// the errors of CreateNcclCommunicator(); what follows, NCCL's own set-up, has
// no deadline. LibTorch's time-outs and its habit of ending the process are
// off: the group's deadlines are the only ones, and errors are a Status.
//
// Captures are cudaStreamCaptureModeThreadLocal or relaxed ones: the threads
// that watch LibTorch's events would break others.
//
// TORCH_NCCL_BLOCKING_WAIT, if set, makes every call wait on the host.
absl::StatusOr<std::unique_ptr<Communicator>> CreateC10dNcclCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const C10dNcclOptions& options = {});

// Rank r of a host takes GPU r modulo their number where `options` names none.
// The timeout is ConnectOptions'.
ConnectDevice C10dNcclBackend(const C10dNcclOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_C10D_BACKEND_C10D_NCCL_H_
