// Records which replicas computed which steps, for a log file and for a replay
// that gives the same bits.
#ifndef REPLICAS_MEMBERSHIP_HISTORY_H_
#define REPLICAS_MEMBERSHIP_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

inline constexpr size_t kMaxHistoryBytes = size_t{64} << 20;

// An epoch, which a line of text describes:
//   epoch 0 founded at step 0 by 0.0: replicas 0.0 1.0 2.0
//   epoch 1 within step 7: replicas 0.0 2.0
//   epoch 2 from step 8: replicas 0.0 1.1 2.0
// Here three replicas began step 7, which became the mean over two of them.
struct Span {
  int64_t epoch = 0;
  Cause cause = Cause::kFounded;
  int64_t from_step = 0;
  ReplicaId founder;                // with kFounded: all begin with its state
  std::vector<ReplicaId> replicas;  // by rising replica, not empty
};

bool operator==(const Span& a, const Span& b);
// Returns the line without a newline.
std::string ToLine(const Span& span);
// Returns the epoch that `roster` begins.
Span SpanOf(const Roster& roster);

// Epochs by number, the first of which is founded, and none missing.
using History = std::map<int64_t, Span>;

// Joins the texts of files, by name, in which replicas of one run have noted
// lines of epochs; empty ones and those that begin with '#' say nothing.
// Returns the epochs since the last founding. InvalidArgument says which line
// is none, and why; or the files contradict each other, or an epoch is missing.
absl::StatusOr<History> ParseHistory(
    const std::map<std::string, std::string>& files);

// Return the log that the run of `history`, which is not empty, had: its first
// entry, and the entry after `roster`.
Roster FirstEntry(const History& history);
Roster EntryAfter(const History& history, const Roster& roster);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_HISTORY_H_
