// Collectives made of messages between two ranks.
#ifndef COMM_GLOO_PEER_COLLECTIVES_H_
#define COMM_GLOO_PEER_COLLECTIVES_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "comm/call.h"
#include "comm/gloo/message_transport.h"

// Groups of messages that fail together.

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

// The backend moves bytes, the arithmetic is ours: hence every dtype and
// reduction with every backend, one rounding, in the order of the ranks, with
// the bits that a local group gives. Every rank sends straight to every other,
// from the caller's buffers into the caller's buffers; each element crosses a
// link once, twice for an all-reduce.
//
// An all-reduce hands on what it has summed while the rest arrives, so that a
// link that is slow is never idle.
//
// Nothing is sent before `agree` has returned OK. Calls block until this rank
// is done. Errors of PeerMessages and of `agree`. One thread at a time.
class PeerCollectives {
 public:
  // Returns OK when all ranks are in the same call.
  using Agree = std::function<absl::Status()>;

  PeerCollectives(int rank, int world_size, PeerMessages* messages);

  int world_size() const { return world_size_; }

  // Buffers as in Communicator; `bytes` and `count` are of one rank's shard...
  absl::Status AllGather(char* out, const char* in, int64_t bytes,
                         const Agree& agree);
  absl::Status AllToAll(char* out, const char* in, int64_t bytes,
                        const Agree& agree);
  absl::Status ReduceScatter(char* out, const char* in, at::ScalarType dtype,
                             int64_t count, ReduceOp op, const Agree& agree);
  // ... and here of the whole buffer.
  absl::Status AllReduce(char* data, at::ScalarType dtype, int64_t count,
                         ReduceOp op, const Agree& agree);
  absl::Status Broadcast(char* data, int64_t bytes, int root,
                         const Agree& agree);

 private:
  using Batch = PeerMessages::Batch;

  // A rank's part of a buffer.
  struct Part {
    int64_t begin;
    int64_t size;
    int64_t end() const { return begin + size; }
  };

  // The equal parts of a buffer; the last ones are smaller or empty.
  std::vector<Part> Divide(int64_t size) const;

  // The other ranks, each rank starting with another one.
  std::vector<int> Peers() const;

  // Told of each range of this rank's part, in elements, that is reduced.
  using Reduced = absl::FunctionRef<absl::Status(int64_t begin, int64_t numel)>;

  // Leaves in `out` this rank's part of the reduction of all `in`.
  absl::Status ReduceParts(const std::vector<Part>& parts, char* out,
                           const char* in, at::ScalarType dtype, ReduceOp op,
                           const Agree& agree, Reduced reduced);

  const int rank_;
  const int world_size_;
  PeerMessages* const messages_;
  // Where contributions to a reduction arrive. Kept: fresh pages are slow.
  std::vector<char> scratch_;
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_PEER_COLLECTIVES_H_
