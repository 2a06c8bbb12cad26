// Ranks that have a c10d backend (ProcessGroupNCCL, XCCL, UCC, MPI, Gloo), by
// its own collectives. c10d_transport.h takes only messages from one.
#ifndef COMM_C10D_BACKEND_C10D_BACKEND_COMMUNICATOR_H_
#define COMM_C10D_BACKEND_C10D_BACKEND_COMMUNICATOR_H_

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/call.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// A backend, and how it ends.
struct C10dConnection {
  c10::intrusive_ptr<c10d::Backend> backend;
  // Ends what runs, for good, from any thread; empty: backend->abort(), or what
  // does the same to Gloo.
  std::function<void()> close;
  // Leaves the peers in peace, with nothing running, when the communicator is
  // destroyed. Empty: nothing happens to the backend, which stays the caller's.
  std::function<void()> leave;
};

// The ranks of a group that is to be made.
struct C10dMeeting {
  c10::intrusive_ptr<c10d::Store> store;  // of this group alone
  int rank = 0;
  std::vector<int> ranks;  // in the group that is split, by new rank
  RankNames names;
};
using C10dConnect =
    std::function<absl::StatusOr<C10dConnection>(const C10dMeeting& meeting)>;

struct C10dBackendOptions {
  // Where tensors are.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // Communicator::default_timeout. That of the backend has to be longer: NCCL's
  // ends the process.
  absl::Duration timeout = absl::Minutes(5);
  // Of each rank, where the group is a part of another one.
  std::vector<int> world_ranks = {};
  // How long a failed rank asks the others what they know.
  absl::Duration diagnosis_timeout = absl::Seconds(2);
  // Makes the backends of sub-groups; empty: Split() is Unimplemented.
  C10dConnect connect;
  // Communicator::HasAllToAll: c10d tells only when it is called.
  bool has_all_to_all = true;
  // Whether the current stream of `device` is being captured into a graph, for
  // backends whose operations can be; empty: operations cannot be captured.
  std::function<bool()> is_capturing;
};

// One rank's end of the group that `connection.backend` makes up. Through
// `store`, which no other group uses and which needs not be the backend's,
// ranks tell each other of failures.
//
// Ranks that are threads of a process need TORCH_FR_BUFFER_SIZE=0 in its
// environment: LibTorch 2.11's flight recorder cannot stand the first
// operations of two groups at once.
//
// Others may use the backend, too, as long as all ranks make all calls in the
// same order; a failure closes it for them as well.
//
// On a device a work of c10d makes a stream wait, not the host: so do
// BlockCurrentStream(), while Wait() polls, and what comes behind a sum runs on
// a stream of this group. On the CPU, and with Gloo and MPI on every device, it
// makes the host wait: a thread of this group does. Sums are plain; what scales
// them comes behind. They are in the backend's order: the same bits
// every time on the same ranks, not those of other communicators.
//
// A collective that the backend lacks is Unimplemented, on all ranks alike and
// without harm. Ranks' calls that differ are seen by nobody: they run into the
// deadline, or the backend returns nonsense.
absl::StatusOr<std::unique_ptr<Communicator>> CreateC10dBackendCommunicator(
    C10dConnection connection, const c10::intrusive_ptr<c10d::Store>& store,
    C10dBackendOptions options = {});

}  // namespace fsdp::comm

#endif  // COMM_C10D_BACKEND_C10D_BACKEND_COMMUNICATOR_H_
