#include "replicas/membership/roster_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::replicas {
namespace {

std::string BellOf(int64_t number) {
  return absl::StrCat("membership/bell/", number);
}

}  // namespace

std::string RosterLog::SlotOf(int64_t number) const {
  return absl::StrCat("membership/log/", number % entries_);
}

absl::StatusOr<Roster> RosterLog::Read(const std::string& slot) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                        registers_->Get(slot));
  if (!text.has_value()) return Roster{};
  absl::StatusOr<Roster> roster = DecodeRoster(*text);
  if (!roster.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(slot, ": ", roster.status().message()));
  }
  return roster;
}

absl::StatusOr<std::optional<Roster>> RosterLog::Entry(int64_t number) {
  FSDP_CHECK(number >= 0);
  FSDP_ASSIGN_OR_RETURN(Roster there, Read(SlotOf(number)));
  if (there.number < number) return std::nullopt;
  if (there.number > number) {
    return absl::OutOfRangeError(absl::StrCat(
        "entry ", number, " of the replicas' log is gone: there is ",
        Describe(there), ". This process has fallen ", there.number - number,
        " entries behind, and is to end"));
  }
  return std::optional<Roster>(std::move(there));
}

absl::StatusOr<Roster> RosterLog::Newest(Roster known) {
  while (true) {
    FSDP_ASSIGN_OR_RETURN(Roster there, Read(SlotOf(known.number + 1)));
    if (there.number <= known.number) return known;
    known = std::move(there);
  }
}

absl::StatusOr<bool> RosterLog::Propose(const Roster& next) {
  const std::string slot = SlotOf(next.number);
  FSDP_ASSIGN_OR_RETURN(const Roster there, Read(slot));
  if (there.number >= next.number) return false;
  const int64_t expected = next.number - entries_;
  if (there.number != (expected < 0 ? -1 : expected)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the keeper of the replicas' log has lost entry ", expected,
        ": there is ", Describe(there), ". The run cannot go on with it"));
  }
  const std::string text = Encode(next);
  FSDP_ASSIGN_OR_RETURN(
      const std::string now,
      registers_->CompareAndSet(slot, expected < 0 ? "" : Encode(there), text));
  if (now != text) return false;
  // The entry is made; the rest may fail, since waits also poll.
  registers_->Set(BellOf(next.number), "1").IgnoreError();
  if (expected >= 0) registers_->Remove(BellOf(expected)).IgnoreError();
  return true;
}

absl::Status RosterLog::Await(int64_t number, absl::Time deadline) {
  return registers_->Await(BellOf(number), deadline);
}

namespace {

constexpr char kCount[] = "membership/notices";
// Notices that are read at once; the others wait for the entry after.
constexpr int64_t kMostAtOnce = 4096;

std::string KeyOf(int64_t number) {
  return absl::StrCat("membership/notice/", number);
}

}  // namespace

absl::StatusOr<int64_t> NoticeBoard::Reserve() {
  return registers_->Add(kCount, 1);
}

absl::Status NoticeBoard::Write(int64_t number, const Notice& notice) {
  return registers_->Set(KeyOf(number), Encode(notice));
}

absl::StatusOr<NoticeBoard::Pending> NoticeBoard::ReadAfter(int64_t after) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                        registers_->Get(kCount));
  int64_t count = 0;
  if (text.has_value() && !absl::SimpleAtoi(*text, &count)) {
    return absl::InvalidArgumentError(absl::StrCat(kCount, " is no number"));
  }
  if (count < after) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the keeper of the replicas' log has lost what it kept: ", count,
        " notices, of which ", after,
        " were read before. The run cannot go on with it"));
  }
  known_.erase(known_.begin(), known_.upper_bound(after));
  Pending pending;
  pending.seen = std::min(count, after + kMostAtOnce);
  for (int64_t number = after + 1; number <= pending.seen; ++number) {
    if (known_.find(number) == known_.end()) {
      FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> written,
                            registers_->Get(KeyOf(number)));
      const absl::StatusOr<Notice> notice = DecodeNotice(written.value_or(""));
      if (!notice.ok()) continue;
      known_.emplace(number, *notice);
    }
    pending.notices.push_back(known_.at(number));
  }
  return pending;
}

void NoticeBoard::Forget(int64_t after, int64_t seen) {
  for (int64_t number = after + 1; number <= seen; ++number) {
    registers_->Remove(KeyOf(number)).IgnoreError();
  }
}

namespace {

std::string BeatKey(const ReplicaId& id, int rank) {
  return absl::StrCat("membership/beat/", ToString(id), "/", rank);
}

}  // namespace

absl::Status Heartbeats::Beat(absl::Time now) {
  if (now < next_beat_) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(registers_->Set(BeatKey(options_.self, options_.rank),
                                       absl::StrCat(++beats_)));
  next_beat_ = now + options_.interval;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ReplicaId>> Heartbeats::Silent(const Roster& roster,
                                                          absl::Time now) {
  std::vector<ReplicaId> silent;
  if (now < next_listening_) return silent;
  std::map<std::string, Heard> heard;
  for (const Member& member : roster.members) {
    bool is_silent = false;
    for (int rank = 0; rank < options_.ranks_per_replica; ++rank) {
      const bool is_own_replica = member.id == options_.self;
      if (is_own_replica == (rank == options_.rank)) continue;
      const std::string key = BeatKey(member.id, rank);
      FSDP_ASSIGN_OR_RETURN(const Heard latest, Listen(key, now));
      heard[key] = latest;
      is_silent |= now - latest.changed >= options_.loss_timeout;
    }
    if (is_silent) silent.push_back(member.id);
  }
  heard_ = std::move(heard);
  next_listening_ = now + options_.interval;
  return silent;
}

absl::StatusOr<Heartbeats::Heard> Heartbeats::Listen(const std::string& key,
                                                     absl::Time now) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> beat,
                        registers_->Get(key));
  const auto before = heard_.find(key);
  if (before != heard_.end() && before->second.beat == beat) {
    return before->second;
  }
  return Heard{beat, now};
}

void Heartbeats::Forget() {
  heard_.clear();
  next_beat_ = absl::InfinitePast();
  next_listening_ = absl::InfinitePast();
}

}  // namespace fsdp::replicas
