// Says in words what ranks were doing: who waits for what, and who is behind.
#ifndef COMM_INSPECTION_RECORD_TEXT_H_
#define COMM_INSPECTION_RECORD_TEXT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/inspection/flight_recorder.h"

namespace fsdp::comm {

// The knowledge that one rank has of another one.
struct SeenRank {
  std::optional<RankRecord> record;
  std::string process;  // "process 4711 is stopped"; "" where that is unknown
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

// True if a rank belongs to the call's group and is known not to have made it.
bool IsBehind(const SeenRank& seen, const GroupCall& call);

// Returns the first operation that is being started or waited for, or null.
const OperationRecord* FirstOpen(const RankRecord& record);

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

#endif  // COMM_INSPECTION_RECORD_TEXT_H_
