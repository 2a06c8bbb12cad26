// Shows a rank what the others record: from their memory on the same host, by a
// store from other hosts.
#ifndef COMM_INSPECTION_PEER_RECORDS_H_
#define COMM_INSPECTION_PEER_RECORDS_H_

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/host/shared_segment.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/record_text.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Used by one thread at a time, except the const methods.
class PeerRecords {
 public:
  // Collective over all ranks that meet in `store`, which nobody else uses.
  // Ranks of the same `host` read each other's memory where they can.
  static absl::StatusOr<std::unique_ptr<PeerRecords>> Connect(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
      const std::string& host, absl::Time deadline);

  int rank() const { return rank_; }
  const std::shared_ptr<FlightRecorder>& recorder() const { return recorder_; }

  // Lets no further process read the memory. Call it once all ranks have
  // connected.
  void Seal();

  // Shows this rank's record to ranks of other hosts, if there are any. If the
  // store does not answer by `deadline`, but within half a second at least, it
  // is never asked again.
  void Publish(absl::Time deadline);

  // Returns the records of all ranks, this one included, by rank. A rank of
  // another host has the record that it has published last; this waits until
  // that is no older than `fresh` by the clock of that host, or `deadline` has
  // passed. The store has the same time as in Publish().
  std::vector<SeenRank> Read(absl::Time fresh, absl::Time deadline);

  // Returns the records of this host's ranks, this one included, without
  // waiting. The vector has all ranks.
  std::vector<SeenRank> ReadHost() const;

  // Returns true for the first rank of this host that calls it.
  bool ClaimForHost() const;

 private:
  struct Peer {
    std::unique_ptr<SharedSegment> segment;  // null: on another host
    std::unique_ptr<PeerProcess> process;
    std::optional<RankRecord> published;
  };
  struct Mail;

  PeerRecords(int rank, int world_size, std::shared_ptr<SharedSegment> own);
  void Open(int peer, const std::string& introduction, const std::string& host);
  void Fetch(const std::vector<int>& wanted, absl::Time deadline);

  const int rank_;
  const std::shared_ptr<SharedSegment> own_;  // null: there is none to share
  const std::shared_ptr<FlightRecorder> recorder_;
  std::vector<Peer> peers_;     // by rank
  std::shared_ptr<Mail> mail_;  // null: no store, or one that does not answer
};

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_PEER_RECORDS_H_
