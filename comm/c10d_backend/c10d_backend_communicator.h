// A communicator over the collectives of a c10d backend (ProcessGroupNCCL,
// XCCL, UCC, MPI, Gloo).
#ifndef COMM_C10D_BACKEND_C10D_BACKEND_COMMUNICATOR_H_
#define COMM_C10D_BACKEND_C10D_BACKEND_COMMUNICATOR_H_

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// A backend, and how to end it.
struct C10dConnection {
  c10::intrusive_ptr<c10d::Backend> backend;  // this rank's; not null
  // Ends all operations for good, from any thread. Empty: backend->abort(), or
  // what does the same to Gloo.
  std::function<void()> close;
  // Called when the communicator is destroyed and nothing runs, to leave
  // without harm to the peers. Empty: nothing happens to the backend, which
  // stays the caller's.
  std::function<void()> leave;
};

// A group that is to be made, as one of its ranks sees it.
struct C10dMeeting {
  c10::intrusive_ptr<c10d::Store> store;  // no other group uses its keys
  int rank = 0;                           // of this process in the new group
  std::vector<int> ranks;  // in the group that is split, by new rank
  RankNames names;         // of the new group, for errors
};
// Makes this rank's backend of a group; blocks until all its ranks have come.
using C10dConnect =
    std::function<absl::StatusOr<C10dConnection>(const C10dMeeting& meeting)>;

// Options of a group over c10d. All ranks pass the same, but for the device's
// index.
struct C10dBackendOptions {
  // The device of the tensors, with its index unless it is the CPU.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // Communicator::default_timeout(). The backend's own has to be longer, since
  // NCCL's ends the process.
  absl::Duration timeout = absl::Minutes(5);
  // The rank in the world of each rank, where the group is a part of it.
  std::vector<int> world_ranks = {};
  // A failed rank asks the others for this long what they know.
  absl::Duration diagnosis_timeout = absl::Seconds(2);
  // Makes the backends of sub-groups; empty: Split() is Unimplemented.
  C10dConnect connect;
  // Communicator::HasAllToAll(). c10d says so only when it is called.
  bool has_all_to_all = true;
  // Returns true while the current stream of `device` is captured into a graph.
  // Empty: the backend's operations cannot be captured.
  std::function<bool()> is_capturing;
};

// Returns one rank's end of the group of `connection.backend`. Ranks tell each
// other of failures in `store`, which no other group uses and which need not be
// the backend's. InvalidArgument: there is no backend or store, or the options
// are wrong.
//
// Ranks that are threads of one process need TORCH_FR_BUFFER_SIZE=0 in its
// environment: LibTorch 2.11's flight recorder fails when two groups make their
// first operations at the same time.
//
// Others may use the backend, too, as long as all ranks make all calls in the
// same order; a failure closes it for them as well.
//
// On a device c10d makes a stream wait, not the host. So does
// BlockCurrentStream(); Wait() polls, and sums are scaled on a stream of this
// group. On the CPU, and with Gloo and MPI on every device, c10d makes the host
// wait, in a thread of this group. Sums are in the backend's order: the same
// ranks get the same bits every time, but not those of other communicators.
//
// A collective that the backend lacks is Unimplemented, on all ranks alike and
// without harm. Nobody sees that ranks make different calls: they run into the
// deadline, or the result is wrong.
CreatedCommunicator CreateC10dBackendCommunicator(
    C10dConnection connection, const c10::intrusive_ptr<c10d::Store>& store,
    C10dBackendOptions options = {});

}  // namespace fsdp::comm

#endif  // COMM_C10D_BACKEND_C10D_BACKEND_COMMUNICATOR_H_
