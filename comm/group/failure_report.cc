#include "comm/group/failure_report.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"

namespace fsdp::comm {
namespace {

// A store is for short values.
constexpr size_t kMaxTextBytes = 2048;

bool Decisive(Cause cause) {
  return cause == Cause::kAbort || cause == Cause::kMismatch;
}

// The rank whose report explains the others; `rank` itself where it is as good
// as any.
int RootCause(int rank, absl::Span<const std::optional<RankReport>> reports) {
  int best = rank;
  for (size_t peer = 0; peer < reports.size(); ++peer) {
    // That a peer left explains a lost connection; see `Elsewhere`.
    if (!reports[peer] || reports[peer]->cause == Cause::kLeft) continue;
    if (reports[peer]->cause < reports[best]->cause) {
      best = static_cast<int>(peer);
    }
  }
  return best;
}

// Where all the other ranks are.
std::string Elsewhere(int rank, const RankNames& names,
                      absl::Span<const std::optional<RankReport>> reports,
                      bool store_answers) {
  std::vector<std::string> known;
  std::vector<std::string> silent;
  for (int peer = 0; peer < names.size(); ++peer) {
    if (peer == rank) continue;
    if (!reports[peer]) {
      silent.push_back(names.Name(peer));
    } else if (reports[peer]->cause == Cause::kLeft) {
      known.push_back(absl::StrCat(names.Name(peer), " has left the group: it ",
                                   reports[peer]->position));
    } else {
      known.push_back(
          absl::StrCat(names.Name(peer), " ", reports[peer]->position));
    }
  }
  if (!silent.empty() && store_answers) {
    known.push_back(absl::StrCat(absl::StrJoin(silent, ", "),
                                 silent.size() == 1 ? " does" : " do",
                                 " not answer: dead, stopped or cut off"));
  } else if (!silent.empty()) {
    known.push_back(absl::StrCat(
        "nothing is known of ", absl::StrJoin(silent, ", "),
        ", because the store does not answer: the process that serves it, "
        "often ",
        names.NameInWorld(0), ", is dead, stopped or cut off"));
  }
  return absl::StrJoin(known, "; ");
}

}  // namespace

std::string Encode(const RankReport& report) {
  return absl::StrCat(static_cast<int>(report.cause), "\n", report.position,
                      "\n",
                      absl::string_view(report.text).substr(0, kMaxTextBytes));
}

std::optional<RankReport> Decode(absl::string_view text) {
  const std::vector<absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('\n', 2));
  int cause = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &cause) || cause < 0 ||
      cause > static_cast<int>(Cause::kEcho)) {
    return std::nullopt;
  }
  return RankReport{static_cast<Cause>(cause), std::string(parts[2]),
                    std::string(parts[1])};
}

bool Explains(absl::Span<const std::optional<RankReport>> reports) {
  bool complete = true;
  for (const auto& report : reports) {
    if (report && Decisive(report->cause)) return true;
    complete = complete && report.has_value();
  }
  return complete;
}

absl::Status Verdict(int rank, const RankNames& names,
                     absl::Span<const std::optional<RankReport>> reports,
                     bool store_answers) {
  FSDP_CHECK(reports[rank].has_value());
  FSDP_CHECK(static_cast<int>(reports.size()) == names.size());
  const int root = RootCause(rank, reports);
  const RankReport& why = *reports[root];
  switch (why.cause) {
    case Cause::kAbort:
      return absl::AbortedError(
          absl::StrCat(names.Name(root), " aborted: ", why.text));
    case Cause::kMismatch:
      return absl::InvalidArgumentError(why.text);
    case Cause::kDeadline: {
      const std::string elsewhere =
          Elsewhere(root, names, reports, store_answers);
      if (root == rank) {
        return absl::DeadlineExceededError(
            absl::StrCat(why.text, "; ", elsewhere));
      }
      return absl::AbortedError(
          absl::StrCat(names.Name(root), ", which ", why.position,
                       ", gave up: ", why.text, "; ", elsewhere));
    }
    case Cause::kLeft:
      return absl::UnavailableError(why.text);
    case Cause::kLost:
    case Cause::kEcho:
      return absl::UnavailableError(absl::StrCat(
          why.text, "; ", Elsewhere(rank, names, reports, store_answers)));
  }
  return absl::InternalError("a cause that has no meaning");
}

}  // namespace fsdp::comm
