// How messages get from one rank to another: what collectives between
// processes ask of a backend.
#ifndef COMM_GLOO_MESSAGE_TRANSPORT_H_
#define COMM_GLOO_MESSAGE_TRANSPORT_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp::comm {

// A message on its way. Dropping it gives it up: its memory is not touched
// afterwards.
class Message {
 public:
  virtual ~Message() = default;

  // Blocks without limit until the message is received, or, for one that is
  // sent, handed to the system. Unavailable when the connection breaks.
  virtual absl::Status Wait() = 0;

  // Makes Wait() return soon. Any thread.
  virtual void Abort() = 0;
};

// One rank's connections to its peers. Messages with the same peer and tag
// arrive in the order of posting; a receive is as long as the send that it
// meets. Thread-safe; must outlive its messages.
class MessageTransport {
 public:
  virtual ~MessageTransport() = default;

  // Start to transfer `bytes` > 0 bytes. The memory belongs to the transport
  // until the message is done or dropped.
  virtual absl::StatusOr<std::shared_ptr<Message>> Send(int peer, int tag,
                                                        const void* data,
                                                        int64_t bytes) = 0;
  virtual absl::StatusOr<std::shared_ptr<Message>> Receive(int peer, int tag,
                                                           void* data,
                                                           int64_t bytes) = 0;

  // Breaks all connections: peers notice at once.
  virtual void Close() = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_MESSAGE_TRANSPORT_H_
