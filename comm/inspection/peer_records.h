// Shows a rank what the others record, from their memory on the same host and
// by a store from other hosts, and says it in words: who waits for what, and
// who is behind.
#ifndef COMM_INSPECTION_PEER_RECORDS_H_
#define COMM_INSPECTION_PEER_RECORDS_H_

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/host/shared_segment.h"
#include "comm/inspection/flight_recorder.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// The knowledge that one rank has of another one.
struct SeenRank {
  std::optional<RankRecord> record;
  std::string process;  // "process 4711 is stopped"; "" where that is unknown
};

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

// A call that all ranks of a group have to make.
struct GroupCall {
  uint64_t group = 0;  // GroupRecord::id
  uint64_t call = 0;
};

// Returns the group's call that an operation is, or nullopt if its group is not
// known.
std::optional<GroupCall> CallOfGroup(const RankRecord& record,
                                     const OperationRecord& operation);

// Returns "all-gather #17 of blocks.3".
std::string NameOf(const OperationRecord& operation);

// Returns "is in all-gather #17 of blocks.3 for 31 s" or "has called nothing
// since ...".
std::string PositionOf(const RankRecord& record);

// Returns "ranks 0, 2 are in it; rank 3 is behind by 5 calls: it is in ...".
// `ranks` are by rank; `rank` itself and those that are known not to belong to
// the group are left out.
std::string StandingOfOthers(int rank, const GroupCall& call,
                             absl::Span<const SeenRank> ranks);

// Returns "rank 2 has waited 30 s for all-gather #17 of blocks.3; " and
// StandingOfOthers().
std::string WaitText(int rank, const OperationRecord& operation,
                     absl::Span<const SeenRank> ranks);

// Returns a paragraph with the last operations, `max_operations` at most,
// oldest first.
std::string RecordText(int rank, const SeenRank& seen, int max_operations);

// Returns who is behind in `call`, the furthest first, then a paragraph for
// each of `max_ranks` ranks at most, those that are behind first.
std::string JoinedText(const std::optional<GroupCall>& call,
                       absl::Span<const SeenRank> ranks, int max_ranks,
                       int max_operations);

// Writes several lines with as few calls of write(2) as possible, so that lines
// of others rarely come between. Returns whether all could be written.
bool WriteWhole(int fd, absl::string_view text);

// Appends in the same way to FOLDER/rank-RANK.txt. Makes the file, and the
// folder if its parent exists. The error names the file.
absl::Status AppendForRank(const std::string& folder, int rank,
                           absl::string_view text);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_PEER_RECORDS_H_
