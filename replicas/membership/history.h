// Who computed which steps, for a log file and for a replay that gives the same
// bits.
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

// An epoch, as a line:
//   epoch 0 founded at step 0 by 0.0: replicas 0.0 1.0 2.0
//   epoch 1 within step 7: replicas 0.0 2.0
//   epoch 2 from step 8: replicas 0.0 1.1 2.0
// Step 7 was begun by three replicas and is the mean over two of them.
struct Span {
  int64_t epoch = 0;
  Cause cause = Cause::kFounded;
  int64_t from_step = 0;
  ReplicaId founder;                // of kFounded: whose state all begin with
  std::vector<ReplicaId> replicas;  // by rising replica, not empty
};

bool operator==(const Span& a, const Span& b);
// Without a newline.
std::string ToLine(const Span& span);

// The epochs from a founding on, rising.
class History {
 public:
  // One line after the other; empty ones and those that begin with '#' do not
  // count. Of several foundings the last one counts. InvalidArgument: which
  // line is none, or does not fit to those before, and why.
  static absl::StatusOr<History> Parse(absl::string_view text);
  // Of one run, as several replicas have seen it, of which none need have been
  // there from the beginning to the end. InvalidArgument: they contradict each
  // other, or an epoch is missing.
  static absl::StatusOr<History> Merge(absl::Span<const History> parts);

  // Takes a roster of the log, in its order, though perhaps not every one of an
  // epoch. The line to append to a file of which Parse() is then this history;
  // nothing where it says nothing new.
  std::optional<std::string> Add(const Roster& roster);

  const std::vector<Span>& spans() const { return spans_; }
  std::string ToText() const;

 private:
  std::vector<Span> spans_;
};

// What the log of a run was whose history is `history`, which begins with a
// founding: its first entry, and what comes after one of them.
Roster FirstEntry(const History& history);
Roster EntryAfter(const History& history, const Roster& roster);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_HISTORY_H_
