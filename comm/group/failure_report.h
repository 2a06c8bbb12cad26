// What the ranks of a failed group tell each other, and what one of them then
// tells its caller.
#ifndef COMM_GROUP_FAILURE_REPORT_H_
#define COMM_GROUP_FAILURE_REPORT_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/rank_names.h"

namespace fsdp::comm {

// Why a rank's group ended. One failure makes others: of several causes the
// one that comes first here explains the rest.
enum class Cause {
  kAbort,     // the rank called Abort()
  kMismatch,  // the rank saw that the calls differ
  kDeadline,  // the rank waited long enough
  kLeft,      // the rank destroyed its communicator
  kLost,      // the rank lost a connection
  kEcho,      // the rank was told by another
};

struct RankReport {
  Cause cause = Cause::kEcho;
  std::string text;      // why, in the rank's own words
  std::string position;  // "is in all-gather #17 of blocks.2"
};

// One string for a report, and back; nullopt for what is not a report.
std::string Encode(const RankReport& report);
std::optional<RankReport> Decode(absl::string_view text);

// Whether `reports` explain the failure: to ask further ranks is not needed.
bool Explains(absl::Span<const std::optional<RankReport>> reports);

// The status of rank `rank`'s operations, with the codes of Work::Wait. By
// rank, nullopt for a rank that did not answer; rank's own is there.
// `store_answers` is false when no rank could have been heard.
absl::Status Verdict(int rank, const RankNames& names,
                     absl::Span<const std::optional<RankReport>> reports,
                     bool store_answers);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_FAILURE_REPORT_H_
