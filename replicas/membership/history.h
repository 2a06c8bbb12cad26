// Records which replicas computed which steps, for a log file and for a replay
// that gives the same bits.
#ifndef REPLICAS_MEMBERSHIP_HISTORY_H_
#define REPLICAS_MEMBERSHIP_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
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

// The epochs since a founding, rising.
class History {
 public:
  // Parses lines but empty ones and those that begin with '#'. Of several
  // foundings the last one counts. InvalidArgument says which line is none, or
  // does not fit those before, and why.
  static absl::StatusOr<History> Parse(absl::string_view text);
  // Joins what several replicas have seen of one run, none of which need have
  // been there all the time. InvalidArgument: they contradict each other, or an
  // epoch is missing.
  static absl::StatusOr<History> Merge(absl::Span<const History> parts);

  // Takes the next roster of the log; rosters within an epoch may be left out.
  // Returns the line to append to a file, so that Parse() gives this history,
  // or nothing if the roster says nothing new.
  std::optional<std::string> Add(const Roster& roster);

  const std::vector<Span>& spans() const { return spans_; }
  std::string ToText() const;

 private:
  std::vector<Span> spans_;
};

// Return the log that the run of `history`, which begins with a founding, had:
// its first entry, and the entry after `roster`.
Roster FirstEntry(const History& history);
Roster EntryAfter(const History& history, const Roster& roster);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_HISTORY_H_
