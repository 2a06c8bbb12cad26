// Collectives made of messages between two ranks, which first make sure that
// all are in the same call.
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
#include "comm/communicator.h"
#include "comm/gloo/message_transport.h"

namespace fsdp::comm {

// Messages that fail together: if one fails, so do all others, earlier and
// later ones. Used by one thread at a time, except Abort().
class PeerMessages {
 public:
  explicit PeerMessages(std::unique_ptr<MessageTransport> transport);
  PeerMessages(const PeerMessages&) = delete;
  PeerMessages& operator=(const PeerMessages&) = delete;

  // Messages that are waited for together. The destructor gives up those that
  // are left. The PeerMessages outlives it.
  class Batch {
   public:
    explicit Batch(PeerMessages* messages) : messages_(messages) {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() { messages_->GiveUp(this); }

   private:
    friend class PeerMessages;
    PeerMessages* const messages_;
    std::vector<PostedMessage> posted_;
  };

  // These do what MessageTransport's methods do; for 0 bytes they do nothing. A
  // receive that cannot be posted fails only when it is waited for, since a
  // peer that is gone may have sent all messages before it.
  absl::Status Send(int peer, int tag, const void* data, int64_t bytes,
                    Batch* batch);
  absl::Status Receive(int peer, int tag, void* data, int64_t bytes,
                       Batch* batch);

  // Blocks until all messages of `batch` are done or one fails, and empties it.
  // Returns Unavailable, or Cancelled after Abort(), which also ends the wait.
  absl::Status Await(Batch* batch);

  // Fails all messages, on the peers, too. Only the first call counts. May be
  // called from any thread.
  void Abort();

 private:
  absl::Status CheckNotAborted();
  absl::Status Add(PostedMessage message, Batch* batch);
  void GiveUp(Batch* batch);
  void AbortLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<MessageTransport> transport_;
  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<Message>> in_flight_ ABSL_GUARDED_BY(mutex_);
};

// Makes sure that all ranks are in the same call before data flows: before each
// operation the ranks send each other their calls. This adds no latency: the
// receives were posted one operation earlier, and a sender has to wait for its
// peers anyway. Without it, calls that differ would hang or, with some
// backends, write past a buffer. Used by one thread at a time.
class CallExchange {
 public:
  CallExchange(int rank, RankNames names, PeerMessages* messages);
  ~CallExchange();
  CallExchange(const CallExchange&) = delete;
  CallExchange& operator=(const CallExchange&) = delete;

  // Posts the receives of the next call. Call it once, first; Agree() does so
  // for each call that follows.
  absl::Status Start();

  // Tells the peers of this rank's call number `sequence`.
  absl::Status Announce(int64_t sequence, const Call& call);

  // Blocks until all peers have announced their call. Returns InvalidArgument,
  // with all calls, if they differ, or the errors of PeerMessages::Await().
  absl::Status Agree();

 private:
  struct Announcement;

  const int rank_;
  const RankNames names_;
  PeerMessages* const messages_;
  std::vector<Announcement> announcements_;  // by rank
  PeerMessages::Batch receives_;
  PeerMessages::Batch sends_;
};

// Collectives in which the backend only moves bytes. Reductions are computed
// here: every dtype works with every backend, in the order of the ranks and
// with one rounding, so that the bits are those of a local group. Every rank
// sends straight to every other one, from caller's buffer to caller's buffer;
// each element crosses a link once, in an all-reduce twice. An all-reduce sends
// on what it has reduced while the rest arrives, so that a slow link is never
// idle.
//
// Nothing is sent before `agree` has returned OK. Calls block until this rank
// is done, and return the errors of PeerMessages and `agree`. Used by one
// thread at a time.
class PeerCollectives {
 public:
  // Returns OK once all ranks are in the same call.
  using Agree = std::function<absl::Status()>;

  PeerCollectives(int rank, int world_size, PeerMessages* messages);

  int world_size() const { return world_size_; }

  // Buffers are those of Communicator. Here `bytes` and `count` are the size of
  // one rank's part...
  //
  // Sends `bytes` from in + peer * stride to each peer: with `bytes` as the
  // stride an all-to-all, and with 0 an all-gather.
  absl::Status Exchange(char* out, const char* in, int64_t stride,
                        int64_t bytes, const Agree& agree);
  absl::Status ReduceScatter(char* out, const char* in, at::ScalarType dtype,
                             int64_t count, ReduceOp op, const Agree& agree);
  // ... and here that of the whole buffer.
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

  // Divides a buffer into equal parts; the last ones may be smaller or empty.
  std::vector<Part> Divide(int64_t size) const;

  // Returns the other ranks. Each rank begins with another one.
  std::vector<int> Peers() const;

  // Called with each range of this rank's part, in elements, that is reduced.
  using Reduced = absl::FunctionRef<absl::Status(int64_t begin, int64_t numel)>;

  // Writes this rank's part of the reduction of all `in` to `out`.
  absl::Status ReduceParts(const std::vector<Part>& parts, char* out,
                           const char* in, at::ScalarType dtype, ReduceOp op,
                           const Agree& agree, Reduced reduced);

  const int rank_;
  const int world_size_;
  PeerMessages* const messages_;
  // Contributions to a reduction arrive here. Kept, since new pages are slow.
  std::vector<char> scratch_;
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_PEER_COLLECTIVES_H_
