// How a rank sees what the others record: in their memory where they are on one
// host, by way of a store where they are not.
#ifndef COMM_INSPECTION_PEER_RECORDS_H_
#define COMM_INSPECTION_PEER_RECORDS_H_

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/host/peer_process.h"
#include "comm/host/shared_segment.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/record_text.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Used by one thread at a time, but for what is const.
class PeerRecords {
 public:
  // Collective, of all ranks that meet in `store`, which nobody else uses.
  // Ranks of the same `host` look into each other's memory where they can.
  static absl::StatusOr<std::unique_ptr<PeerRecords>> Connect(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
      const std::string& host, absl::Time deadline);

  int rank() const { return rank_; }
  const std::shared_ptr<FlightRecorder>& recorder() const { return recorder_; }

  // Once all ranks have connected: nobody else can look any more.
  void Seal();

  // Shows this rank's record to ranks of other hosts, if there are any. A store
  // that does not answer by `deadline`, or half a second later than now, is
  // asked nothing more.
  void Publish(absl::Time deadline);

  // Of all ranks, this one included. Of ranks of other hosts what they have
  // published last: looks until that is no older than `fresh` by their clocks,
  // or `deadline` has passed; of the store as Publish().
  std::vector<SeenRank> Read(absl::Time fresh, absl::Time deadline);

  // Of the ranks of this host, this one included, at once. By rank of all.
  std::vector<SeenRank> ReadHost() const;

  // Whether this rank is the first of its host to call it.
  bool ClaimForHost() const;

 private:
  struct Peer {
    std::unique_ptr<SharedSegment> segment;  // null: of another host
    std::unique_ptr<PeerProcess> process;
    std::optional<RankRecord> published;
  };
  struct Mail;

  PeerRecords(int rank, int world_size, std::shared_ptr<SharedSegment> own);
  void Open(int peer, const std::string& introduction, const std::string& host);
  void Fetch(absl::Time fresh, absl::Time deadline);

  const int rank_;
  const std::shared_ptr<SharedSegment> own_;  // null: there is none to share
  const std::shared_ptr<FlightRecorder> recorder_;
  std::vector<Peer> peers_;     // by rank
  std::shared_ptr<Mail> mail_;  // null: no store, or one that does not answer
};

// A rank's record as a message to ranks of other hosts.

inline constexpr int kSentOperations = 16;  // the last ones
inline constexpr size_t kMaxEncodedBytes = 4096;

// Of kMaxEncodedBytes at most.
std::string EncodeRecord(const RankRecord& record);

// Nothing for what is no record: of more bytes, or others than EncodeRecord()
// makes. What it gives is as bounded as what EncodeRecord() has been given, and
// its text can be printed.
std::optional<RankRecord> DecodeRecord(absl::string_view bytes);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_PEER_RECORDS_H_
