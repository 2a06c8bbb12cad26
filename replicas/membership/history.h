// Who computed which steps, for a log file and for a replay that gives the same
// bits.
#ifndef REPLICAS_MEMBERSHIP_HISTORY_H_
#define REPLICAS_MEMBERSHIP_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

inline constexpr size_t kMaxHistoryBytes = size_t{64} << 20;

// From step `from_step` on, up to the next span's, the gradients are the mean
// over these replicas.
struct Span {
  int64_t from_step = 0;
  std::vector<ReplicaId> replicas;  // by rising replica, not empty
};

// "from step 7: replicas 0.1 2.1", without a newline.
std::string ToLine(const Span& span);

// Of a roster with members. All of the log's are to be added, in its order.
Span ToSpan(const Roster& roster);

// What is added later stands for all steps from its own on, in place of before:
// a step that was lost and computed again by fewer, or again from a checkpoint
// after nobody was left, was computed by those who did so last.
class History {
 public:
  // One line after the other, each with a newline; empty lines and those that
  // begin with '#' do not count. InvalidArgument: which line is none, and why.
  static absl::StatusOr<History> Parse(absl::string_view text);

  // Whether it says something new: ToLine() of it is the line to append then to
  // a file of which Parse() is this history.
  bool Add(const Span& span);

  // By whom this step was, or is to be, computed. Empty: before the first.
  absl::Span<const ReplicaId> ReplicasAt(int64_t step) const;
  const std::vector<Span>& spans() const { return spans_; }
  // Parse() of this is the same history.
  std::string ToText() const;

 private:
  std::vector<Span> spans_;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_HISTORY_H_
