// Makes sure that all ranks are in the same call before data flows.
#ifndef COMM_GLOO_CALL_EXCHANGE_H_
#define COMM_GLOO_CALL_EXCHANGE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "comm/call.h"
#include "comm/gloo/peer_messages.h"
#include "comm/rank_names.h"

namespace fsdp::comm {

// Before each operation the ranks send each other what they are about to do.
// This adds no latency: the receives were posted one operation earlier, and a
// sender has to wait for its peers anyway. Without it, calls that differ would
// hang or, with some backends, write past a buffer. One thread at a time.
class CallExchange {
 public:
  CallExchange(int rank, RankNames names, PeerMessages* messages);
  ~CallExchange();
  CallExchange(const CallExchange&) = delete;
  CallExchange& operator=(const CallExchange&) = delete;

  // Posts the first receives. Once.
  absl::Status Start();

  // Tells the peers of this rank's call number `sequence`.
  absl::Status Announce(int64_t sequence, const Call& call);

  // Blocks until all peers have announced their call. InvalidArgument, with all
  // calls, when they differ; else errors of PeerMessages::Await.
  absl::Status Agree();

 private:
  struct Announcement;

  absl::Status PostReceives();
  absl::Status Compare() const;

  const int rank_;
  const RankNames names_;
  PeerMessages* const messages_;
  std::vector<Announcement> announcements_;  // by rank
  PeerMessages::Batch receives_;
  PeerMessages::Batch sends_;
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_CALL_EXCHANGE_H_
