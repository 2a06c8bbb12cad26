// A communicator of processes on any number of hosts, over Gloo's TCP
// connections.
#ifndef COMM_GLOO_GLOO_COMMUNICATOR_H_
#define COMM_GLOO_GLOO_COMMUNICATOR_H_

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

struct GlooOptions {
  // Communicator::default_timeout().
  absl::Duration timeout = absl::Minutes(5);
  // All ranks have to connect within this time, or within `timeout` if that is
  // less.
  absl::Duration connect_timeout = absl::InfiniteDuration();
  // Communicator::ToString() says this behind the name, as " without ...".
  std::string note;
  // The rank in the world of each rank, where the group is a part of it.
  std::vector<int> world_ranks = {};
  // A failed rank asks the others for this long what they know. A Wait() that
  // fails returns no later than this after the failure or its deadline.
  absl::Duration diagnosis_timeout = absl::Seconds(2);
  // The address that peers connect to, by name or number, or the network
  // interface that has it ("eth0"), but not both. By default it is the address
  // of this host's name, or else the loopback address.
  std::string hostname;
  std::string interface;
};

// Returns one rank's end of a group. All ranks create their groups on a store
// in the same order. Blocks until all ranks have connected; DeadlineExceeded
// names those that have not. A rank that fails tells the others.
//
// Collectives run in order on a thread of this group. Every dtype and reduction
// of Communicator works, with the bits of a local group. Calls that differ
// between ranks fail on all of them. A failure of one rank reaches the others
// at once by the store, and their errors say where every rank was and which do
// not answer. If the process that serves the store is gone, they say only what
// the connections have noticed. When the communicator is destroyed, operations
// that have not been waited for fail, also on the peers.
CreatedCommunicator CreateGlooCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const GlooOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_GLOO_GLOO_COMMUNICATOR_H_
