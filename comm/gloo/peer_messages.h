// Groups of messages that fail together.
#ifndef COMM_GLOO_PEER_MESSAGES_H_
#define COMM_GLOO_PEER_MESSAGES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "comm/gloo/message_transport.h"

namespace fsdp::comm {

// Any failure breaks the group: Abort() is called, everything posted and posted
// later fails. One thread at a time, except for Abort().
class PeerMessages {
 public:
  explicit PeerMessages(std::unique_ptr<MessageTransport> transport);
  PeerMessages(const PeerMessages&) = delete;
  PeerMessages& operator=(const PeerMessages&) = delete;

  // Messages that were posted and are waited for together. What is left of it
  // is given up by the destructor. Must not outlive the PeerMessages.
  class Batch {
   public:
    explicit Batch(PeerMessages* messages) : messages_(messages) {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() { messages_->GiveUp(this); }

   private:
    friend class PeerMessages;
    PeerMessages* const messages_;
    std::vector<std::shared_ptr<Message>> posted_;
  };

  // As MessageTransport; nothing happens for 0 bytes. A receive fails when it
  // is waited for, never before: a peer that is gone may have sent all that was
  // posted earlier.
  absl::Status Send(int peer, int tag, const void* data, int64_t bytes,
                    Batch* batch);
  absl::Status Receive(int peer, int tag, void* data, int64_t bytes,
                       Batch* batch);

  // Blocks until all of `batch` is done or one message fails, and empties it.
  // Unavailable, or Cancelled after Abort(), which ends this.
  absl::Status Await(Batch* batch);

  // Fails everything, on the peers' side too. Idempotent, any thread.
  void Abort();

 private:
  absl::Status CheckNotAborted();
  absl::Status Add(absl::StatusOr<std::shared_ptr<Message>> message,
                   Batch* batch);
  void GiveUp(Batch* batch);
  void AbortLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<MessageTransport> transport_;
  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<Message>> in_flight_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_PEER_MESSAGES_H_
