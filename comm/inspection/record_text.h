// What ranks were doing, in words: who waits for what, and who is behind.
#ifndef COMM_INSPECTION_RECORD_TEXT_H_
#define COMM_INSPECTION_RECORD_TEXT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/inspection/flight_recorder.h"

namespace fsdp::comm {

// What one rank knows of another one.
struct SeenRank {
  std::optional<RankRecord> record;
  std::string process;  // "process 4711 is stopped"; "" where that is unknown
};

// A call that all ranks of a group have to make.
struct GroupCall {
  uint64_t group = 0;  // GroupRecord::id
  uint64_t call = 0;
};

// That of an operation; nothing where it is of no known group.
std::optional<GroupCall> CallOfGroup(const RankRecord& record,
                                     const OperationRecord& operation);

// Whether a rank of the call's group is known not to have made it.
bool IsBehind(const SeenRank& seen, const GroupCall& call);

// The first operation that is waited for; null: none.
const OperationRecord* FirstOpen(const RankRecord& record);

// "all-gather #17 of blocks.3".
std::string NameOf(const OperationRecord& operation);

// "is in all-gather #17 of blocks.3 for 31 s", "has called nothing since ...".
std::string PositionOf(const RankRecord& record);

// "ranks 0, 2 are in it; rank 3 is behind by 5 calls: it is in ...". By rank;
// `rank` itself is left out. Ranks that are known not to be of the group are,
// too.
std::string StandingOfOthers(int rank, const GroupCall& call,
                             absl::Span<const SeenRank> ranks);

// "rank 2 has waited 30 s for all-gather #17 of blocks.3; " and that of others.
std::string WaitText(int rank, const OperationRecord& operation,
                     absl::Span<const SeenRank> ranks);

// A paragraph with the last operations, `max_operations` at most, oldest first.
std::string RecordText(int rank, const SeenRank& seen, int max_operations);

// Who is behind in `call`, the most first, then a paragraph for each rank, for
// `max_ranks` at most: those that are behind come first.
std::string JoinedText(const std::optional<GroupCall>& call,
                       absl::Span<const SeenRank> ranks, int max_ranks,
                       int max_operations);

// Texts of several lines that others' lines do not come between, where the
// system can help it.

// By as few calls of write(2) as it takes; drops what cannot be written.
void WriteWhole(int fd, absl::string_view text);

// To FOLDER/rank-RANK.txt; makes the file, and the folder if its parent is
// there. The error names the file.
absl::Status AppendForRank(const std::string& folder, int rank,
                           absl::string_view text);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_RECORD_TEXT_H_
