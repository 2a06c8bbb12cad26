// Messages between two ranks over a c10d backend.
#ifndef COMM_PEER_MESSAGES_H_
#define COMM_PEER_MESSAGES_H_

#include <cstdint>
#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace fsdp::comm {

// A backend and how to break its connections, so that peers notice at once and
// nothing is transferred any more. `close` may be empty where the backend's
// abort() does that.
struct C10dBackend {
  c10::intrusive_ptr<c10d::Backend> group;
  std::function<void()> close;
};

// Messages with the same peer and tag arrive in the order of posting. A receive
// must be as long as the send that it meets. Any failure breaks the group:
// Abort() is called, everything posted and posted later fails. One thread at a
// time, except for Abort().
class PeerMessages {
 public:
  explicit PeerMessages(C10dBackend backend);
  PeerMessages(const PeerMessages&) = delete;
  PeerMessages& operator=(const PeerMessages&) = delete;

  // Messages that were posted and are waited for together. What is left of it
  // is given up by the destructor: nothing is transferred from or to its memory
  // afterwards. Must not outlive the PeerMessages.
  class Batch {
   public:
    explicit Batch(PeerMessages* messages) : messages_(messages) {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() { messages_->GiveUp(this); }

   private:
    friend class PeerMessages;
    struct Posted {
      int peer;
      c10::intrusive_ptr<c10d::Work> work;
    };
    PeerMessages* const messages_;
    std::vector<Posted> posted_;
  };

  // Start to transfer `bytes` >= 0 bytes; nothing is sent for 0.
  absl::Status Send(int peer, int tag, const void* data, int64_t bytes,
                    Batch* batch);
  absl::Status Receive(int peer, int tag, void* data, int64_t bytes,
                       Batch* batch);

  // Blocks until all of `batch` is done (a send: handed to the system) or
  // fails, and empties it. Unavailable with the peer, or Cancelled after
  // Abort(). Blocks without limit: Abort() ends it.
  absl::Status Await(Batch* batch);

  // Fails everything, on the peers' side too. Idempotent, any thread.
  void Abort();

 private:
  enum class Direction { kSend, kReceive };
  absl::Status Post(Direction direction, int peer, int tag, char* data,
                    int64_t bytes, Batch* batch);
  absl::Status PostOne(Direction direction, int peer, int tag, char* data,
                       int64_t bytes, Batch* batch);
  void GiveUp(Batch* batch);
  void ForgetLocked(const c10::intrusive_ptr<c10d::Work>& work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const C10dBackend backend_;
  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> in_flight_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::comm

#endif  // COMM_PEER_MESSAGES_H_
