#include "replicas/live_log.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <system_error>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/output_file.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "comm/agreement.h"

namespace fsdp::replicas {
namespace {

constexpr char kNamePrefix[] = "replica-";
constexpr char kNameSuffix[] = ".txt";

}  // namespace

absl::StatusOr<std::unique_ptr<HistoryFile>> HistoryFile::Open(
    const std::string& folder, const ReplicaId& self) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string path =
      absl::StrCat(folder, "/", kNamePrefix, self.replica, kNameSuffix);
  std::error_code ignored;  // a folder that cannot be read is reported below
  if (self.incarnation == 1 && std::filesystem::exists(path, ignored)) {
    return absl::AlreadyExistsError(absl::StrCat(
        path,
        " is the history of another run: name another folder, or remove "
        "this one"));
  }
  std::unique_ptr<HistoryFile> file(new HistoryFile(path));
  if (error || !std::ofstream(path, std::ios::app)) {
    return absl::ErrnoToStatus(
        error ? error.value() : errno,
        absl::StrCat("opening the history of replicas, ", path));
  }
  return file;
}

absl::StatusOr<History> ReadHistory(const std::string& folder) {
  std::error_code error;
  std::map<std::string, std::string> files;
  std::filesystem::directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string path = entry->path().string();
    const std::string name = entry->path().filename().string();
    if (!absl::StartsWith(name, kNamePrefix) ||
        !absl::EndsWith(name, kNameSuffix)) {
      continue;
    }
    FSDP_ASSIGN_OR_RETURN(files[name], ReadRegularFile(path));
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(),
                               absl::StrCat("reading the folder ", folder));
  }
  absl::StatusOr<History> history = ParseHistory(files);
  if (!history.ok()) return Annotate(history.status(), folder);
  if (!history->empty()) return history;
  return absl::InvalidArgumentError(
      absl::StrCat(folder, " has no history of replicas"));
}

absl::Status HistoryFile::Add(const Roster& roster) {
  if (roster.epoch <= epoch_) return absl::OkStatus();
  epoch_ = roster.epoch;
  std::error_code ignored;
  const uintmax_t size = std::filesystem::file_size(path_, ignored);
  std::ofstream file(path_, std::ios::app);
  file << ToLine(SpanOf(roster)) << "\n" << std::flush;
  if (file) return absl::OkStatus();
  absl::Status status = absl::ErrnoToStatus(
      errno, absl::StrCat("writing the history of replicas to ", path_));
  file.close();
  std::filesystem::resize_file(path_, size, ignored);  // leaves no half line
  return status;
}

namespace {

// A rank waits so long before it asks whether the program is to end and whether
// the keeper still answers.
constexpr absl::Duration kSlice = absl::Seconds(1);

constexpr char kEntering[] = "entering replicas";

// Turns an error of a replica that is not a member any more into kAborted, with
// which its process may start anew.
absl::Status AsLost(const absl::Status& status) {
  if (!absl::IsFailedPrecondition(status) && !absl::IsAlreadyExists(status) &&
      !absl::IsOutOfRange(status)) {
    return status;
  }
  return absl::AbortedError(absl::StrCat(
      "this replica has been given up for lost: ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LiveLog>> LiveLog::Start(
    LiveLogOptions options, std::unique_ptr<Registers> registers) {
  std::unique_ptr<LiveLog> log(
      new LiveLog(std::move(options), std::move(registers)));
  FSDP_ASSIGN_OR_RETURN(
      log->membership_,
      Membership::Create(log->options_.membership, log->registers_.get()));
  const MembershipOptions& membership = log->options_.membership;
  if (!log->options_.history_folder.empty() && membership.rank == 0) {
    FSDP_ASSIGN_OR_RETURN(
        log->history_,
        HistoryFile::Open(log->options_.history_folder, membership.self));
  }
  FSDP_ASSIGN_OR_RETURN(log->thread_,
                        StartThread("to watch over replicas",
                                    [raw = log.get()] { raw->Watch(); }));
  return log;
}

LiveLog::~LiveLog() {
  {
    absl::MutexLock lock(&mutex_);
    stops_ = true;
  }
  if (thread_.joinable()) thread_.join();
  // If this fails, the others notice the silence.
  if (entered_ && !over_) {
    TellGone(*registers_, options_.membership.self).IgnoreError();
  }
}

// --- The rank's own thread --------------------------------------------------

absl::StatusOr<int64_t> LiveLog::AwaitMembership(absl::Status mine) {
  int64_t number = kNotYet;
  if (mine.ok() && options_.membership.rank == 0) {
    const absl::StatusOr<Roster> roster =
        membership_->AwaitMembership(absl::Now() + kSlice);
    if (roster.ok()) {
      number = roster->number;
    } else if (!absl::IsDeadlineExceeded(roster.status())) {
      mine = roster.status();
    }
  }
  if (options_.stop_requested && options_.stop_requested()) {
    mine.Update(absl::CancelledError(
        "asked to stop while this replica waited to take part"));
  }
  comm::Communicator* const inside = options_.inside;
  if (inside != nullptr && inside->world_size() > 1) {
    const absl::Time deadline = absl::Now() + inside->default_timeout();
    FSDP_RETURN_IF_ERROR(comm::Agree(*inside, mine, kEntering, deadline));
    const at::Tensor text = at::full({1}, number, at::kLong);
    FSDP_RETURN_IF_ERROR(
        comm::BroadcastTensor(*inside, text, /*root=*/0, kEntering, deadline));
    number = text.item<int64_t>();
  }
  FSDP_RETURN_IF_ERROR(mine);
  return number;
}

absl::StatusOr<Roster> LiveLog::Entry(int64_t number) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<Roster> entry,
                        membership_->Entry(number));
  if (entry.has_value()) return *entry;
  return absl::InternalError(
      absl::StrCat("entry ", number, " of the replicas' log is gone"));
}

absl::StatusOr<Roster> LiveLog::Enter(int64_t first_step) {
  entered_ = true;
  absl::Status requested;
  if (options_.membership.rank == 0) {
    requested = membership_->Request(first_step);
    // A request that did not get through is made again by AwaitMembership().
    if (absl::IsUnavailable(requested)) requested = absl::OkStatus();
  }
  int64_t number = kNotYet;
  while (number == kNotYet) {
    FSDP_ASSIGN_OR_RETURN(number, AwaitMembership(requested));
  }
  FSDP_ASSIGN_OR_RETURN(Roster roster, Entry(number));
  over_ = membership_->HasEnded(roster);
  if (over_) return roster;
  // With this entry its step began.
  while (roster.cause == Cause::kLost) {
    FSDP_ASSIGN_OR_RETURN(roster, Entry(roster.number - 1));
  }
  Note(roster);
  entered_with_ = number;
  return roster;
}

absl::StatusOr<Roster> LiveLog::SkipLosses(const Roster& roster) {
  Roster newest = roster;
  while (membership_->latest().number > newest.number) {
    FSDP_ASSIGN_OR_RETURN(newest,
                          AwaitNext(newest, absl::Now() + options_.patience));
  }
  return newest;
}

absl::Status LiveLog::VoteFor(const Roster& roster) {
  const absl::Time deadline = absl::Now() + options_.patience;
  for (;;) {
    absl::Status status = AsLost(membership_->VoteFor(roster));
    if (!absl::IsUnavailable(status) || absl::Now() >= deadline) return status;
    absl::SleepFor(options_.membership.beat_interval);
  }
}

absl::StatusOr<Roster> LiveLog::AwaitNext(const Roster& roster,
                                          absl::Time deadline) {
  absl::Time answered = absl::Now();
  absl::StatusOr<Roster> next = absl::UnknownError("");
  for (;;) {
    const absl::Time now = absl::Now();
    next = membership_->AwaitNext(roster, std::min(deadline, now + kSlice));
    const bool is_silent = absl::IsUnavailable(next.status());
    if (!is_silent) answered = absl::Now();
    if (!is_silent && !absl::IsDeadlineExceeded(next.status())) break;
    if (now >= deadline || now - answered > options_.patience) break;
  }
  if (!next.ok()) return AsLost(next.status());
  over_ = membership_->HasEnded(*next);
  Note(*next);
  return next;
}

// Tells a person about `roster`; training goes on even if that fails.
void LiveLog::Note(const Roster& roster) {
  const ReplicaId& self = options_.membership.self;
  if (roster.cause == Cause::kFounded && roster.epoch > 0 &&
      options_.membership.rank == 0 && Donor(roster)->id == self) {
    std::cerr << absl::StrCat(
        "fsdp: no replica was left that had the state of the run, which begins "
        "again at step ",
        roster.step, " with that of replica ", ToString(self), "\n");
  }
  if (history_ == nullptr) return;
  const absl::Status added = history_->Add(roster);
  if (added.ok()) return;
  std::cerr << absl::StrCat(
      "fsdp: replica ", ToString(self),
      " does not write its history any more: ", added.ToString(), "\n");
  history_ = nullptr;
}

// --- The thread that watches ------------------------------------------------

void LiveLog::Watch() {
  absl::MutexLock lock(&mutex_);
  while (!stops_) {
    mutex_.Unlock();
    WatchOnce();
    mutex_.Lock();
    mutex_.AwaitWithTimeout(absl::Condition(&stops_),
                            options_.membership.beat_interval);
  }
}

// Ignores that the keeper does not answer: a call that needs it reports that.
void LiveLog::WatchOnce() {
  TakeUpEnds(membership_->latest());
  const absl::StatusOr<Roster> newest = membership_->Poll();
  if (!newest.ok()) return;
  const int64_t entered = entered_with_;
  if (options_.inside != nullptr && entered >= 0 && newest->number > entered &&
      !IsMember(*newest, options_.membership.self)) {
    // The other ranks wait for the one because of which the replica is lost.
    options_.inside->Abort(absl::AbortedError(absl::StrCat(
        "this replica has been given up for lost: ", Describe(*newest))));
  }
  if (newest->epoch <= epoch_) return;
  epoch_ = newest->epoch;
  if (options_.on_epoch) options_.on_epoch(epoch_);
}

void LiveLog::TakeUpEnds(const Roster& roster) {
  for (const Member& member : roster.members) {
    if (member.id == options_.membership.self) continue;
    const absl::StatusOr<bool> has_ended = registers_->HasAll(
        {absl::StrCat("gone/", member.id.replica, "/", member.id.incarnation)});
    if (!has_ended.ok()) return;
    if (*has_ended) TellGone(*registers_, member.id).IgnoreError();
  }
}

absl::StatusOr<Roster> ReplayLog::Enter(int64_t first_step) {
  Roster roster = FirstEntry(history_);
  const Span& founding = history_.begin()->second;
  if (founding.founder == self_ && founding.from_step != first_step) {
    return absl::FailedPreconditionError(
        absl::StrCat("the history begins with step ", founding.from_step,
                     ", but this run with step ", first_step,
                     ": begin with the checkpoint with which that one began"));
  }
  while (roster.step < steps_ &&
         (roster.cause == Cause::kLost || !IsMember(roster, self_))) {
    roster = EntryAfter(history_, roster);
  }
  if (roster.step < steps_) return roster;
  return HasNoStep(roster);
}

// Does not return OK, which would say that the run has come to its end: whoever
// took part may have ended with an error in this replay.
absl::Status ReplayLog::HasNoStep(const Roster& end) {
  const std::string what =
      absl::StrCat("the history has no step of replica ", ToString(self_));
  const bool comes_later = absl::c_any_of(history_, [this](const auto& epoch) {
    return absl::c_any_of(epoch.second.replicas, [this](const ReplicaId& id) {
      return id.replica == self_.replica && id.incarnation > self_.incarnation;
    });
  });
  if (comes_later) {
    return AsRecorded(
        absl::AbortedError(absl::StrCat(what, ", but of its later lives")));
  }
  const Member* const last = FindMember(end, self_.replica);
  if (last == nullptr || last->id == self_) {
    return AsRecorded(absl::InvalidArgumentError(
        absl::StrCat(what, " before step ", steps_, ": it has nothing to do")));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": replica ", ToString(last->id),
      " took part to the end, but has ended earlier now. What it ended with "
      "is the error; this replay cannot go on: start it again"));
}

absl::StatusOr<Roster> ReplayLog::SkipLosses(const Roster& roster) {
  Roster newest = roster;
  for (;;) {
    Roster next = EntryAfter(history_, newest);
    if (next.cause != Cause::kLost) return newest;
    newest = next;
    if (!IsMember(newest, self_)) {
      return AsRecorded(absl::AbortedError(
          absl::StrCat("replica ", ToString(self_), " was lost in step ",
                       roster.step, ", as the history says")));
    }
  }
}

absl::Status ReplayLog::VoteFor(const Roster& /*roster*/) {
  return absl::OkStatus();
}

absl::StatusOr<Roster> ReplayLog::AwaitNext(const Roster& roster,
                                            absl::Time /*deadline*/) {
  Roster next = EntryAfter(history_, roster);
  if (next.step >= steps_ || IsMember(next, self_)) return next;
  return AsRecorded(absl::AbortedError(
      absl::StrCat("replica ", ToString(self_), " was lost after step ",
                   roster.step, ", as the history says")));
}

absl::Status ReplayLog::AsRecorded(const absl::Status& status) {
  ends_as_recorded_ = true;
  return status;
}

}  // namespace fsdp::replicas
