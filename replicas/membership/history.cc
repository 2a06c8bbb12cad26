#include "replicas/membership/history.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace fsdp::replicas {
namespace {

// A larger count in a file cannot come from a run.
constexpr int64_t kFar = int64_t{1} << 61;

// By Cause.
constexpr absl::string_view kCauses[] = {"founded at", "from", "within"};

// Returns nullopt if `line` is not a line of a history.
std::optional<Span> ParseLine(absl::string_view line) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(line, absl::ByAnyChar(" :"));
  Span span;
  for (const Cause cause : {Cause::kFounded, Cause::kFinished, Cause::kLost}) {
    const auto text = kCauses[static_cast<size_t>(cause)];
    if (words.size() > 2 && absl::StartsWith(text, words[2])) {
      span.cause = cause;
    }
  }
  const bool founds = span.cause == Cause::kFounded;
  const size_t step = founds ? 5 : 4;
  const size_t first = step + (founds ? 5 : 3);  // of the replicas
  if (words.size() <= first || !absl::SimpleAtoi(words[1], &span.epoch) ||
      !absl::SimpleAtoi(words[step], &span.from_step) || span.epoch < 0 ||
      span.epoch > kFar || span.from_step < 0 || span.from_step > kFar) {
    return std::nullopt;
  }
  for (size_t i = first; i < words.size(); ++i) {
    const std::optional<ReplicaId> id = ParseReplicaId(words[i]);
    if (!id.has_value() || (!span.replicas.empty() &&
                            span.replicas.back().replica >= id->replica)) {
      return std::nullopt;
    }
    span.replicas.push_back(*id);
  }
  if (founds) {
    const std::optional<ReplicaId> id = ParseReplicaId(words[7]);
    if (!id.has_value() || !absl::c_linear_search(span.replicas, *id)) {
      return std::nullopt;
    }
    span.founder = *id;
  }
  if (ToLine(span) != line) return std::nullopt;  // other words, "007", "+7"
  return span;
}

// Says why `span` cannot follow `before`; empty if it can.
absl::string_view Misfit(const Span& before, const Span& span) {
  if (span.epoch != before.epoch + 1) return "an epoch before it is missing";
  if (span.from_step < before.from_step) return "its step is an earlier one";
  if (span.cause == Cause::kFinished) {
    const bool later = span.from_step > before.from_step;
    return later ? "" : "its step has begun already";
  }
  const bool all_were_there =
      absl::c_all_of(span.replicas, [&](const ReplicaId& id) {
        return absl::c_linear_search(before.replicas, id);
      });
  const bool fewer = span.replicas.size() < before.replicas.size();
  return all_were_there && fewer ? "" : "nobody is lost in it";
}

absl::Status AddLines(absl::string_view text, History& history) {
  if (text.size() > kMaxHistoryBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a history of ", text.size(),
                                                   " bytes is longer than ",
                                                   kMaxHistoryBytes));
  }
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const std::optional<Span> span = ParseLine(line);
    if (!span.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "line ", number, " of the history, \"",
          absl::CHexEscape(line.substr(0, 80)), "\", is none of a history"));
    }
    const Span& known = history.try_emplace(span->epoch, *span).first->second;
    if (known == *span) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("histories of different runs: \"", ToLine(known),
                     "\" in one, \"", line, "\" in another"));
  }
  return absl::OkStatus();
}

}  // namespace

bool operator==(const Span& a, const Span& b) {
  return a.epoch == b.epoch && a.cause == b.cause &&
         a.from_step == b.from_step && a.founder == b.founder &&
         a.replicas == b.replicas;
}

std::string ToLine(const Span& span) {
  std::string line = absl::StrCat("epoch ", span.epoch, " ",
                                  kCauses[static_cast<size_t>(span.cause)],
                                  " step ", span.from_step);
  if (span.cause == Cause::kFounded) {
    absl::StrAppend(&line, " by ", ToString(span.founder));
  }
  absl::StrAppend(&line, ": replicas");
  for (const ReplicaId& id : span.replicas) {
    absl::StrAppend(&line, " ", ToString(id));
  }
  return line;
}

Span SpanOf(const Roster& roster) {
  Span span{roster.epoch, roster.cause, roster.step, {}, {}};
  if (roster.cause == Cause::kFounded) span.founder = Donor(roster)->id;
  for (const Member& member : roster.members) {
    span.replicas.push_back(member.id);
  }
  return span;
}

absl::StatusOr<History> ParseHistory(
    const std::map<std::string, std::string>& files) {
  History history;
  for (const auto& [name, text] : files) {
    FSDP_RETURN_IF_ERROR(Annotate(AddLines(text, history), name));
  }
  const auto founding = std::find_if(
      history.rbegin(), history.rend(),
      [](const auto& item) { return item.second.cause == Cause::kFounded; });
  if (founding != history.rend()) {
    history.erase(history.begin(), std::prev(founding.base()));
  }
  const Span* before = nullptr;
  for (const auto& [epoch, span] : history) {
    const absl::string_view misfit = before != nullptr ? Misfit(*before, span)
                                     : span.cause == Cause::kFounded
                                         ? ""
                                         : "an epoch before it is missing";
    if (!misfit.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", ToLine(span), "\": ", misfit,
                       ": the files of all replicas are needed"));
    }
    before = &span;
  }
  return history;
}

Roster FirstEntry(const History& history) {
  const Span& span = history.begin()->second;
  Roster roster{/*number=*/0,       span.epoch,      span.from_step,
                /*notices_seen=*/0, Cause::kFounded, {}};
  for (const ReplicaId& id : span.replicas) {
    roster.members.push_back({id, /*is_new=*/id != span.founder});
  }
  return roster;
}

Roster EntryAfter(const History& history, const Roster& roster) {
  const auto found = history.upper_bound(roster.epoch);
  const Span* const later = found == history.end() ? nullptr : &found->second;
  Roster next = roster;
  ++next.number;
  const bool is_lost = later != nullptr && later->cause == Cause::kLost &&
                       later->from_step == roster.step;
  next.cause = is_lost ? Cause::kLost : Cause::kFinished;
  if (!is_lost) {
    ++next.step;
    for (Member& member : next.members) member.is_new = false;
  }
  if (later == nullptr || later->from_step != next.step) return next;
  if (later->cause != next.cause) return next;  // a loss within the next step
  next.epoch = later->epoch;
  next.members.clear();
  for (const ReplicaId& id : later->replicas) {
    const Member* const before = FindMember(roster, id.replica);
    const bool was_member = before != nullptr && before->id == id;
    next.members.push_back({id, !was_member || (is_lost && before->is_new)});
  }
  return next;
}

}  // namespace fsdp::replicas
