// A communicator of processes, on any number of hosts, over Gloo.
#ifndef COMM_GLOO_GLOO_COMMUNICATOR_H_
#define COMM_GLOO_GLOO_COMMUNICATOR_H_

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/gloo/message_communicator.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

struct GlooOptions : MessageOptions {
  // The address that peers connect to, by name or number, or the network
  // interface that has it ("eth0"); both is InvalidArgument. By default it is
  // the address of this host's name, or else the loopback address.
  std::string hostname;
  std::string interface;
};

// Returns one rank's end of a group of CreateMessageCommunicator(), over Gloo's
// TCP connections.
absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const GlooOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_GLOO_GLOO_COMMUNICATOR_H_
