#include "replicas/membership/roster.h"

#include <limits>
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"

namespace fsdp::replicas {
namespace {

// No run counts further, and one more still fits into an int64_t.
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max() / 2;
constexpr absl::string_view kCauses[] = {"founded", "finished", "lost"};

// Returns whether this life has left, or a later one has come.
bool IsOver(const ReplicaId& id, absl::Span<const Notice> pending) {
  return absl::c_any_of(pending, [&](const Notice& notice) {
    return notice.id.replica == id.replica &&
           (notice.id.incarnation > id.incarnation ||
            (notice.kind == Notice::Kind::kLeave && notice.id == id));
  });
}

bool SameIds(const std::vector<Member>& a, const std::vector<Member>& b) {
  return absl::c_equal(
      a, b, [](const Member& x, const Member& y) { return x.id == y.id; });
}

Roster Following(const Roster& before, Cause cause) {
  Roster next = before;
  next.number = before.number + 1;
  next.cause = cause;
  return next;
}

std::optional<int64_t> ParseCount(absl::string_view text) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < 0 || value > kMaxCount) {
    return std::nullopt;
  }
  return value;
}

// Returns as much of a refused text as an error shows.
std::string Shown(absl::string_view text) {
  return absl::CHexEscape(text.substr(0, 80));
}

absl::Status NoRoster(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("no roster: \"", Shown(text), "\": ", why));
}

// Says why no rule can have made `roster`; empty if one can.
absl::string_view Wrong(const Roster& roster) {
  if (roster.epoch > roster.number) return "the epoch is beyond the number";
  for (size_t i = 1; i < roster.members.size(); ++i) {
    if (roster.members[i - 1].id.replica >= roster.members[i].id.replica) {
      return "the members are not in order";
    }
  }
  const auto old = absl::c_count_if(
      roster.members, [](const Member& member) { return !member.is_new; });
  if (!roster.members.empty() && old == 0) return "all members are new";
  if (roster.cause == Cause::kFounded && old != 1) {
    return "a founding has one donor";
  }
  if (roster.cause != Cause::kFounded && roster.number == 0) {
    return "the first entry is a founding";
  }
  if (roster.cause == Cause::kFinished && roster.step == 0) {
    return "no step was finished";
  }
  return "";
}

}  // namespace

std::string ToString(const ReplicaId& id) {
  return absl::StrCat(id.replica, ".", id.incarnation);
}

std::optional<ReplicaId> ParseReplicaId(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('.', 1));
  ReplicaId id;
  if (!absl::SimpleAtoi(parts.first, &id.replica) || id.replica < 0 ||
      id.replica >= kMaxReplicas ||
      !absl::SimpleAtoi(parts.second, &id.incarnation) || id.incarnation < 0 ||
      ToString(id) != text) {
    return std::nullopt;
  }
  return id;
}

const Member* FindMember(const Roster& roster, int replica) {
  for (const Member& member : roster.members) {
    if (member.id.replica == replica) return &member;
  }
  return nullptr;
}

const Member* Donor(const Roster& roster) {
  for (const Member& member : roster.members) {
    if (!member.is_new) return &member;
  }
  return nullptr;
}

std::vector<Notice> Waiting(absl::Span<const Notice> pending) {
  std::map<int, Notice> joins;
  for (const Notice& notice : pending) {
    if (notice.kind == Notice::Kind::kJoin && !IsOver(notice.id, pending)) {
      joins[notice.id.replica] = notice;
    }
  }
  std::vector<Notice> waiting;
  waiting.reserve(joins.size());
  for (const auto& join : joins) waiting.push_back(join.second);
  return waiting;
}

std::vector<ReplicaId> Gone(const Roster& roster,
                            absl::Span<const Notice> pending) {
  std::vector<ReplicaId> gone;
  for (const Member& member : roster.members) {
    if (IsOver(member.id, pending)) gone.push_back(member.id);
  }
  return gone;
}

Roster Found(const Roster& before, absl::Span<const Notice> pending,
             int64_t seen) {
  const std::vector<Notice> waiting = Waiting(pending);
  FSDP_CHECK(before.members.empty() && !waiting.empty());
  const auto first =
      absl::c_max_element(waiting, [](const Notice& a, const Notice& b) {
        return a.first_step < b.first_step;
      });
  Roster next = Following(before, Cause::kFounded);
  next.epoch = before.epoch + 1;
  next.step = first->first_step;
  next.notices_seen = seen;
  for (const Notice& notice : waiting) {
    next.members.push_back({notice.id, /*is_new=*/notice.id != first->id});
  }
  return next;
}

Roster AfterStep(const Roster& roster, absl::Span<const Notice> pending,
                 int64_t seen) {
  FSDP_CHECK(!roster.members.empty());
  const std::vector<ReplicaId> gone = Gone(roster, pending);
  Roster next = Following(roster, Cause::kFinished);
  next.step = roster.step + 1;
  next.members.clear();
  for (const Member& member : roster.members) {
    if (absl::c_linear_search(gone, member.id)) continue;
    next.members.push_back({member.id, /*is_new=*/false});
  }
  if (!next.members.empty()) {
    next.notices_seen = seen;
    for (const Notice& notice : Waiting(pending)) {
      if (FindMember(next, notice.id.replica) != nullptr) continue;
      next.members.push_back({notice.id, /*is_new=*/true});
    }
    absl::c_sort(next.members, [](const Member& a, const Member& b) {
      return a.id.replica < b.id.replica;
    });
  }
  next.epoch += SameIds(roster.members, next.members) ? 0 : 1;
  return next;
}

Roster Without(const Roster& roster, absl::Span<const ReplicaId> gone) {
  Roster next = Following(roster, Cause::kLost);
  next.epoch = roster.epoch + 1;
  next.members.clear();
  for (const Member& member : roster.members) {
    if (!absl::c_linear_search(gone, member.id)) next.members.push_back(member);
  }
  FSDP_CHECK(next.members.size() < roster.members.size());
  if (Donor(next) == nullptr) next.members.clear();
  return next;
}

std::string Encode(const Roster& roster) {
  std::string text = absl::StrCat(roster.number, " ", roster.epoch, " ",
                                  roster.step, " ", roster.notices_seen, " ",
                                  kCauses[static_cast<size_t>(roster.cause)]);
  for (const Member& member : roster.members) {
    absl::StrAppend(&text, " ", ToString(member.id), member.is_new ? "*" : "");
  }
  return text;
}

absl::StatusOr<Roster> DecodeRoster(absl::string_view text) {
  if (text.size() > kMaxRosterBytes) return NoRoster(text, "it is too long");
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
  if (words.size() < 5) return NoRoster(text, "it is too short");
  Roster roster;
  int64_t* const counts[] = {&roster.number, &roster.epoch, &roster.step,
                             &roster.notices_seen};
  for (size_t i = 0; i < 4; ++i) {
    const std::optional<int64_t> count = ParseCount(words[i]);
    if (!count.has_value()) return NoRoster(text, "a number is none");
    *counts[i] = *count;
  }
  const auto* const cause = absl::c_find(kCauses, words[4]);
  if (cause == std::end(kCauses)) return NoRoster(text, "the cause is none");
  roster.cause = static_cast<Cause>(cause - std::begin(kCauses));
  for (size_t i = 5; i < words.size(); ++i) {
    absl::string_view word = words[i];
    const bool is_new = absl::ConsumeSuffix(&word, "*");
    const std::optional<ReplicaId> id = ParseReplicaId(word);
    if (!id.has_value()) return NoRoster(text, "a member is none");
    roster.members.push_back({*id, is_new});
  }
  if (const absl::string_view wrong = Wrong(roster); !wrong.empty()) {
    return NoRoster(text, wrong);
  }
  // Each number has one text, so that "007" is refused.
  if (Encode(roster) != text) return NoRoster(text, "it is written otherwise");
  return roster;
}

std::string Encode(const Notice& notice) {
  return notice.kind == Notice::Kind::kLeave
             ? absl::StrCat("leave ", ToString(notice.id))
             : absl::StrCat("join ", ToString(notice.id), " ",
                            notice.first_step);
}

absl::StatusOr<Notice> DecodeNotice(absl::string_view text) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(text.substr(0, kMaxRosterBytes), absl::MaxSplits(' ', 2));
  Notice notice;
  // A split of an empty view without data has no words.
  if (!words.empty() && words[0] == "leave") notice.kind = Notice::Kind::kLeave;
  const std::optional<ReplicaId> id =
      ParseReplicaId(words.size() > 1 ? words[1] : "");
  const std::optional<int64_t> step =
      ParseCount(words.size() > 2 ? words[2] : "0");
  if (id.has_value() && step.has_value()) {
    notice.id = *id;
    notice.first_step = *step;
    if (Encode(notice) == text) return notice;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("neither a join nor a leave: \"", Shown(text), "\""));
}

std::string Describe(const Roster& roster) {
  if (roster.number < 0) return "no entry yet";
  std::string text = absl::StrCat(
      "entry ", roster.number, " (step ", roster.step, ", epoch ", roster.epoch,
      ", ", kCauses[static_cast<size_t>(roster.cause)], "):");
  if (roster.members.empty()) absl::StrAppend(&text, " nobody");
  for (const Member& member : roster.members) {
    absl::StrAppend(&text, " ", ToString(member.id),
                    member.is_new ? "(new)" : "");
  }
  return text;
}

}  // namespace fsdp::replicas
