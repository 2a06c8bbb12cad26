// The interface by which collectives between processes send messages from one
// rank to another, and its implementation for c10d backends.
#ifndef COMM_GLOO_MESSAGE_TRANSPORT_H_
#define COMM_GLOO_MESSAGE_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// A message on its way. Once this object is destroyed, the message's memory is
// not touched any more.
class Message {
 public:
  virtual ~Message() = default;

  // Blocks without limit until a message is received, or until one that is sent
  // is handed to the system. Unavailable: the connection has broken.
  virtual absl::Status Wait() = 0;

  // Makes Wait() return soon. May be called from any thread.
  virtual void Abort() = 0;
};

// A message, or why it cannot be transferred.
using PostedMessage = absl::StatusOr<std::shared_ptr<Message>>;

// One rank's connections to its peers. Messages with the same peer and tag
// arrive in the order in which they are posted; a receive is as long as the
// send that it meets. Thread-safe. Outlives its messages.
class MessageTransport {
 public:
  virtual ~MessageTransport() = default;

  // These start to transfer `bytes` > 0 bytes. The memory belongs to the
  // transport until the message is done or destroyed.
  virtual PostedMessage Send(int peer, int tag, const void* data,
                             int64_t bytes) = 0;
  virtual PostedMessage Receive(int peer, int tag, void* data,
                                int64_t bytes) = 0;

  // Breaks all connections: peers notice at once.
  virtual void Close() = 0;
};

// Sends messages over `backend`, which has send() and recv() for CPU tensors
// and no other user. `names` are those of its ranks. `close` breaks its
// connections.
std::unique_ptr<MessageTransport> C10dTransport(
    c10::intrusive_ptr<c10d::Backend> backend, RankNames names,
    std::function<void()> close);

}  // namespace fsdp::comm

#endif  // COMM_GLOO_MESSAGE_TRANSPORT_H_
