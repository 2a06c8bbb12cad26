#include "comm/group/operation_watchdog.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::comm {

namespace {

constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);
constexpr char kLate[] = "not done at the deadline";

}  // namespace

WatchedGroup::Failure WatchedGroup::OwnFailure(const absl::Status& status) {
  std::string text(status.message());
  if (absl::IsUnavailable(status)) return {{Cause::kLost, std::move(text)}};
  return {{Cause::kAbort, std::move(text)}, status};
}

WatchedGroup::WatchedGroup(std::unique_ptr<ReportExchange> reports,
                           const Options& options, Hooks hooks)
    : options_(options),
      hooks_(std::move(hooks)),
      reports_(std::move(reports)) {}

WatchedGroup::~WatchedGroup() {
  StopWatching();
  reports_->Stop();
}

absl::Status WatchedGroup::Start() {
  FSDP_ASSIGN_OR_RETURN(
      thread_, StartThread("to watch collectives", [this] { Watch(); }));
  return reports_->Start([this] {
    FailWith({{Cause::kEcho, "another rank has failed"}});
  });
}

void WatchedGroup::Watch() {
  if (hooks_.enter) hooks_.enter();
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&ending_), kWatchInterval)) {
        return;
      }
    }
    Poll(absl::Now());
  }
}

void WatchedGroup::StopWatching() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

absl::StatusOr<std::shared_ptr<WatchedGroup::Operation>> WatchedGroup::Begin(
    Call call, int64_t bytes) {
  std::shared_ptr<Operation> operation;
  {
    absl::MutexLock lock(&mutex_);
    operation =
        std::make_shared<Operation>(std::move(call), next_sequence_++, bytes,
                                    absl::Now() + options_.timeout);
    if (failure_) {
      operation->state_ = State::kFailed;
    } else {
      running_.push_back(operation);
    }
  }
  if (failed()) return ErrorOf(*operation);
  return operation;
}

void WatchedGroup::Launched(Operation& operation, Query is_done) {
  absl::MutexLock lock(&mutex_);
  operation.is_done_ = std::move(is_done);
}

absl::Status WatchedGroup::NotLaunched(const Operation& operation,
                                       const absl::Status& why) {
  FailWith(OwnFailure(why));
  return ErrorOf(operation);
}

void WatchedGroup::Keep(Operation& operation, std::shared_ptr<void> what) {
  absl::MutexLock lock(&mutex_);
  if (operation.state_ == State::kRunning) operation.kept_ = std::move(what);
}

WatchedGroup::State WatchedGroup::StateOf(const Operation& operation) {
  Released released;
  bool failed = false;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Status status = TakeOffDoneLocked(released);
    failed = !status.ok() && FailLocked(OwnFailure(status), released);
    if (!failed) return operation.state_;
  }
  StopDevice();
  absl::MutexLock lock(&mutex_);
  return operation.state_;
}

void WatchedGroup::Poll(absl::Time now) {
  Released released;
  bool failed = false;
  {
    absl::MutexLock lock(&mutex_);
    if (failure_) return;
    absl::Status status = TakeOffDoneLocked(released);
    if (status.ok()) status = hooks_.health();
    if (!status.ok()) {
      failed = FailLocked(OwnFailure(status), released);
    } else if (!running_.empty() && running_.front()->deadline_ < now) {
      failed = FailLocked({{Cause::kDeadline, kLate}}, released);
    }
  }
  if (failed) StopDevice();
}

bool WatchedGroup::idle() const {
  absl::MutexLock lock(&mutex_);
  return running_.empty();
}

bool WatchedGroup::failed() const {
  absl::MutexLock lock(&mutex_);
  return failure_.has_value();
}

absl::Status WatchedGroup::TakeOffDoneLocked(Released& released) {
  while (!running_.empty()) {
    Operation& oldest = *running_.front();
    if (!oldest.is_done_) break;
    const absl::StatusOr<bool> is_done = oldest.is_done_();
    if (!is_done.ok()) return is_done.status();
    if (!*is_done) break;
    oldest.state_ = State::kDone;
    released.push_back(std::move(oldest.kept_));
    last_done_ = oldest.name();
    running_.pop_front();
  }
  return absl::OkStatus();
}

bool WatchedGroup::FailLocked(Failure failure, Released& released) {
  if (failure_) return false;
  // An error only ends this last look: what still runs fails below.
  TakeOffDoneLocked(released).IgnoreError();
  failure.report.position = PositionLocked();
  failure_ = std::move(failure);
  for (const std::shared_ptr<Operation>& operation : running_) {
    operation->state_ = State::kFailed;
    released.push_back(std::move(operation->kept_));
  }
  running_.clear();
  return true;
}

std::string WatchedGroup::PositionLocked() const {
  if (!running_.empty()) {
    const Operation& oldest = *running_.front();
    return absl::StrCat("is in ", oldest.name());
  }
  if (last_done_.empty()) return "has finished nothing yet";
  return absl::StrCat("has finished ", last_done_, " and called nothing since");
}

void WatchedGroup::FailWith(Failure failure) {
  Released released;
  bool failed = false;
  {
    absl::MutexLock lock(&mutex_);
    failed = FailLocked(std::move(failure), released);
  }
  if (failed) StopDevice();
}

void WatchedGroup::StopDevice() {
  RankReport report;
  {
    absl::MutexLock lock(&mutex_);
    report = failure_->report;
  }
  // Half of the time is for waiters to hear of a search that found nobody.
  reports_->Report(report, options_.diagnosis_timeout / 2);
  hooks_.stop();
  absl::MutexLock lock(&mutex_);
  stopped_ = true;
}

WatchedGroup::Failure WatchedGroup::AwaitStopped() const {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&stopped_));
  return *failure_;
}

absl::Status WatchedGroup::Wait(const Operation& operation,
                                absl::Time deadline) {
  absl::Duration pause = absl::Microseconds(5);
  while (true) {
    switch (StateOf(operation)) {
      case State::kDone:
        return absl::OkStatus();
      case State::kFailed:
        return ErrorOf(operation);
      case State::kRunning:
        break;
    }
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      FailWith({{Cause::kDeadline, kLate}});
      continue;
    }
    absl::SleepFor(std::min(pause, deadline - now));
    pause = std::min(pause * 2, absl::Microseconds(200));
  }
}

absl::Status WatchedGroup::Check(const Operation& operation) {
  if (failed() && StateOf(operation) == State::kFailed) {
    return ErrorOf(operation);
  }
  return absl::OkStatus();
}

void WatchedGroup::Abort(const absl::Status& reason) {
  FailWith({{Cause::kAbort, std::string(reason.message())}});
}

void WatchedGroup::Fail(const absl::Status& status) {
  FailWith(OwnFailure(status));
  AwaitStopped();
}

void WatchedGroup::Leave(absl::Duration patience,
                         absl::FunctionRef<void()> close) {
  {
    absl::MutexLock lock(&mutex_);
    if (left_) return;
    left_ = true;
  }
  // Waits for what is under way, since a program may end without waiting for
  // it. The group may fail meanwhile.
  const absl::Time deadline = absl::Now() + patience;
  Poll(absl::Now());
  while (!idle() && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
    Poll(absl::Now());
  }
  if (failed()) AwaitStopped();
  RankReport farewell{Cause::kLeft};
  {
    absl::MutexLock lock(&mutex_);
    farewell.position = PositionLocked();
  }
  // Peers must be able to read it when the library lets go of them.
  reports_->Leave(farewell);
  if (!idle()) {
    FailWith({{Cause::kLeft, "this rank has left the group"}});
  }
  close();
  StopWatching();
  reports_->Stop();
}

absl::Status WatchedGroup::ErrorOf(const Operation& operation) {
  return Annotate(FindVerdict(), Describe(operation));
}

std::string WatchedGroup::Describe(const Operation& operation) const {
  const Call& call = operation.call_;
  return absl::StrCat(operation.name(), " on ",
                      options_.names.Place(options_.rank), " (", call.dtype,
                      " x ", call.count, ", ", operation.bytes_, " bytes)");
}

absl::Status WatchedGroup::FindVerdict() {
  const Failure failure = AwaitStopped();
  if (failure.status) return *failure.status;
  {
    absl::MutexLock lock(&mutex_);
    if (verdict_) return *verdict_;
  }
  ReportExchange::Findings findings =
      reports_->Await(absl::Now() + options_.diagnosis_timeout);
  absl::MutexLock lock(&mutex_);
  if (!verdict_) {
    findings.reports[options_.rank] = failure.report;
    verdict_ = Verdict(options_.rank, options_.names, findings.reports,
                       findings.store_answers);
  }
  return *verdict_;
}

}  // namespace fsdp::comm
