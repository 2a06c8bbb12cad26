#include "comm/inspection/inspector.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

// Limits of the interval at which the inspector looks what this rank waits for:
// short enough for `warn_after`, and long enough to cost nothing.
constexpr absl::Duration kMinInterval = absl::Milliseconds(10);
constexpr absl::Duration kMaxInterval = absl::Seconds(5);
// The longest wait for the records of ranks of other hosts.
constexpr absl::Duration kFetch = absl::Seconds(1);
// The longest wait of Stop() for the thread, which is then left behind.
constexpr absl::Duration kPatience = absl::Seconds(4);
// The most that standard error gets of a failure; the file gets all.
constexpr int kRanksOnTerminal = 8;
constexpr int kOperationsOnTerminal = 4;

// Returns a text such as "1.5 GiB".
std::string BytesText(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) {
    return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1 << 30));
  }
  if (bytes >= 1 << 20) {
    return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  }
  return absl::StrCat(bytes >> 10, " KiB");
}

}  // namespace

Inspector::Inspector(InspectorOptions options,
                     std::unique_ptr<PeerRecords> peers)
    : options_(std::move(options)),
      peers_(std::move(peers)),
      recorder_(peers_ != nullptr ? peers_->recorder()
                                  : std::make_shared<FlightRecorder>()) {}

absl::StatusOr<std::shared_ptr<Inspector>> Inspector::Start(
    InspectorOptions options, std::unique_ptr<PeerRecords> peers) {
  if (!options.write) {
    options.write = [](absl::string_view lines) {
      WriteWhole(STDERR_FILENO, lines);
    };
  }
  std::shared_ptr<Inspector> inspector(
      new Inspector(std::move(options), std::move(peers)));
  if (inspector->peers_ == nullptr) return inspector;
  absl::MutexLock lock(&inspector->mutex_);
  // The thread keeps the inspector alive, should it be left behind.
  FSDP_ASSIGN_OR_RETURN(inspector->thread_,
                        StartThread("to watch for ranks that hang",
                                    [inspector] { inspector->Run(); }));
  inspector->ended_ = false;
  return inspector;
}

void Inspector::Note(Phase phase, absl::string_view unit, int64_t pool_bytes) {
  recorder_->Note(phase, unit, pool_bytes, absl::GetCurrentTimeNanos());
}

uint64_t Inspector::BeginWait(StoreWait wait, absl::string_view what) {
  return recorder_->BeginWait(wait, what, absl::GetCurrentTimeNanos());
}

void Inspector::EndWait(uint64_t wait) { recorder_->EndWait(wait); }

std::string Inspector::Describe() const {
  SeenRank own;
  own.record = recorder_->Read(absl::GetCurrentTimeNanos());
  own.process = absl::StrCat("process ", own.record->pid);
  const std::string status = "/proc/self/status";
  const int64_t resident = NumberAfter("VmRSS:", status, /*otherwise=*/-1);
  const int64_t peak = NumberAfter("VmHWM:", status, /*otherwise=*/-1);
  if (resident >= 0 && peak >= 0) {
    absl::StrAppend(&own.process, ", ", BytesText(resident << 10),
                    " resident, ", BytesText(peak << 10), " at most, ",
                    BytesText(own.record->pool_bytes), " in pools");
  }
  return RecordText(peers_ == nullptr ? 0 : peers_->rank(), own,
                    FlightRecorder::kOperations);
}

void Inspector::OnFailure(FlightRecorder::Ticket ticket,
                          const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (has_failed_ || stopping_ || peers_ == nullptr) return;
    has_failed_ = true;
  }
  // The host's records are read at once, since ranks that are behind may catch
  // up when the others have given up. They are read before the failure is
  // claimed, so that the first look is the one shown.
  Failure failure{ticket.value, status, peers_->ReadHost()};
  const bool wakes_people =
      absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status);
  failure.is_shown =
      options_.shows_failures && wakes_people && peers_->ClaimForHost();
  absl::MutexLock lock(&mutex_);
  failure_ = std::move(failure);
}

void Inspector::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    mutex_.AwaitWithTimeout(absl::Condition(&ended_), kPatience);
    if (!thread_.joinable()) return;
    if (!ended_) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

void Inspector::Run() {
  const absl::Duration interval = options_.interval.value_or(
      options_.warn_after <= absl::ZeroDuration()
          ? kMaxInterval
          : std::clamp(options_.warn_after / 4, kMinInterval, kMaxInterval));
  const auto has_news = [this]() {
    mutex_.AssertHeld();
    return stopping_ || failure_.has_value();
  };
  while (true) {
    std::optional<Failure> failure;
    bool stopping = false;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&has_news), interval);
      failure = std::exchange(failure_, std::nullopt);
      stopping = stopping_;
    }
    if (failure) Join(*failure);
    if (stopping) break;
    if (!failure) Look();
  }
  absl::MutexLock lock(&mutex_);
  ended_ = true;
}

// Returns whether to warn now that the operation takes long. The next warning
// is due after twice the time.
bool Inspector::IsDue(const OperationRecord& operation, int64_t now_ns) {
  const int64_t lasted = now_ns - operation.open_since_ns();
  const int64_t limit = absl::ToInt64Nanoseconds(options_.warn_after);
  int64_t& due = due_ns_.try_emplace(operation.ticket, limit).first->second;
  if (lasted < due) return false;
  while (due <= lasted) due *= 2;
  return true;
}

void Inspector::Look() {
  const absl::Time now = absl::Now();
  peers_->Publish(now + kFetch);
  if (options_.warn_after <= absl::ZeroDuration()) return;
  const int64_t now_ns = absl::ToUnixNanos(now);
  const RankRecord own = recorder_->Read(now_ns);
  std::vector<OperationRecord> due;
  std::map<uint64_t, int64_t> still_waited_for;
  for (const OperationRecord& operation : own.operations) {
    if (!operation.is_open()) continue;
    if (IsDue(operation, now_ns)) due.push_back(operation);
    still_waited_for[operation.ticket] = due_ns_[operation.ticket];
  }
  due_ns_ = std::move(still_waited_for);
  if (due.empty()) return;
  const std::vector<SeenRank> ranks = peers_->Read(now, now + kFetch);
  for (const OperationRecord& operation : due) {
    options_.write(absl::StrCat(
        "fsdp: ", WaitText(peers_->rank(), operation, ranks), "\n"));
  }
}

void Inspector::Join(const Failure& failure) {
  const absl::Time now = absl::Now();
  peers_->Publish(now + kFetch);
  const RankRecord& own = *failure.host[peers_->rank()].record;
  std::optional<GroupCall> call;
  absl::Time begin = now;
  for (const OperationRecord& operation : own.operations) {
    if (operation.ticket != failure.ticket) continue;
    call = CallOfGroup(own, operation);
    begin = absl::FromUnixNanos(operation.started_ns);
  }
  std::vector<SeenRank> ranks = peers_->Read(begin, now + kFetch);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (failure.host[rank].record) ranks[rank] = failure.host[rank];
  }
  const std::string title = absl::StrCat(
      "fsdp: rank ", peers_->rank(), " has failed (", failure.status.ToString(),
      "). What the ranks were doing:\n");
  if (!options_.folder.empty()) {
    const absl::Status written = AppendForRank(
        options_.folder, peers_->rank(),
        absl::StrCat(title,
                     JoinedText(call, ranks, static_cast<int>(ranks.size()),
                                FlightRecorder::kOperations)));
    if (!written.ok()) {
      options_.write(absl::StrCat("fsdp: ", written.message(), "\n"));
    }
  }
  if (!failure.is_shown) return;
  options_.write(absl::StrCat(
      title, JoinedText(call, ranks, kRanksOnTerminal, kOperationsOnTerminal)));
}

}  // namespace fsdp::comm
