#include "comm/group/operation_watchdog.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::comm {

namespace {

constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);
constexpr absl::string_view kLate = "not done at the deadline";

OperationWatchdog::Failure FailureOf(Cause cause, absl::string_view text) {
  OperationWatchdog::Failure failure;
  failure.report.cause = cause;
  failure.report.text = std::string(text);
  return failure;
}

OperationWatchdog::Failure OwnFailure(const absl::Status& status) {
  if (absl::IsUnavailable(status)) {
    return FailureOf(Cause::kLost, status.message());
  }
  OperationWatchdog::Failure failure =
      FailureOf(Cause::kAbort, status.message());
  failure.status = status;
  return failure;
}

StartedWork Start(Communicator& group) {
  return group.Broadcast(at::zeros({1}), /*root=*/0, "the failure watch");
}

}  // namespace

std::string OperationWatchdog::Operation::Describe(
    absl::string_view place) const {
  return absl::StrCat(name(), " on ", place, " (", call_.dtype, " x ",
                      call_.count, ", ", bytes_, " bytes)");
}

OperationWatchdog::OperationWatchdog(Hooks hooks) : hooks_(std::move(hooks)) {}

OperationWatchdog::~OperationWatchdog() { Stop(); }

absl::Status OperationWatchdog::Start(absl::Duration interval) {
  FSDP_ASSIGN_OR_RETURN(
      thread_,
      StartThread("to watch collectives", [this, interval] { Run(interval); }));
  return absl::OkStatus();
}

void OperationWatchdog::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<OperationWatchdog::Operation> OperationWatchdog::Begin(
    Call call, int64_t bytes, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  auto operation = std::make_shared<Operation>(
      std::move(call), next_sequence_++, bytes, deadline);
  if (failure_) {
    operation->state_ = State::kFailed;
  } else {
    running_.push_back(operation);
  }
  return operation;
}

void OperationWatchdog::Launched(Operation& operation, Query is_done) {
  absl::MutexLock lock(&mutex_);
  operation.is_done_ = std::move(is_done);
}

void OperationWatchdog::Keep(Operation& operation, std::shared_ptr<void> what) {
  absl::MutexLock lock(&mutex_);
  if (operation.state_ == State::kRunning) operation.kept_ = std::move(what);
}

OperationWatchdog::State OperationWatchdog::StateOf(
    const Operation& operation) {
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

void OperationWatchdog::Poll(absl::Time now) {
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
      failed = FailLocked(FailureOf(Cause::kDeadline, kLate), released);
    }
  }
  if (failed) StopDevice();
}

void OperationWatchdog::Fail(Failure failure) {
  Released released;
  bool failed = false;
  {
    absl::MutexLock lock(&mutex_);
    failed = FailLocked(std::move(failure), released);
  }
  if (failed) StopDevice();
}

void OperationWatchdog::Fail(const absl::Status& status) {
  Fail(OwnFailure(status));
}

OperationWatchdog::Failure OperationWatchdog::AwaitStopped() const {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&stopped_));
  return *failure_;
}

std::optional<OperationWatchdog::Failure> OperationWatchdog::failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

bool OperationWatchdog::idle() const {
  absl::MutexLock lock(&mutex_);
  return running_.empty();
}

std::string OperationWatchdog::Position() const {
  absl::MutexLock lock(&mutex_);
  return PositionLocked();
}

absl::Status OperationWatchdog::TakeOffDoneLocked(Released& released) {
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

bool OperationWatchdog::FailLocked(Failure failure, Released& released) {
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

std::string OperationWatchdog::PositionLocked() const {
  if (!running_.empty()) {
    const Operation& oldest = *running_.front();
    return absl::StrCat("is in ", oldest.name());
  }
  if (last_done_.empty()) return "has finished nothing yet";
  return absl::StrCat("has finished ", last_done_, " and called nothing since");
}

void OperationWatchdog::StopDevice() {
  hooks_.stop(*failure());
  absl::MutexLock lock(&mutex_);
  stopped_ = true;
}

void OperationWatchdog::Run(absl::Duration interval) {
  if (hooks_.enter) hooks_.enter();
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&ending_), interval)) return;
    }
    Poll(absl::Now());
  }
}

AbortListener::AbortListener(
    Communicator* group, std::function<void(const absl::Status&)> on_failure)
    : group_(group), on_failure_(std::move(on_failure)) {}

AbortListener::~AbortListener() { Join(); }

absl::Status AbortListener::Begin() {
  if (group_->rank() == 0) return absl::OkStatus();
  const auto watch = [this,
                      work = std::make_shared<StartedWork>(Start(*group_))] {
    result_ =
        work->ok() ? (**work)->Wait(absl::InfiniteFuture()) : work->status();
    if (!result_.ok()) on_failure_(result_);
  };
  FSDP_ASSIGN_OR_RETURN(thread_, StartThread("to watch the group", watch));
  return absl::OkStatus();
}

absl::Status AbortListener::End() {
  if (group_->rank() == 0) {
    FSDP_ASSIGN_OR_RETURN(auto work, Start(*group_));
    return work->Wait(absl::InfiniteFuture());
  }
  Join();
  return result_;
}

void AbortListener::Join() {
  if (thread_.joinable()) thread_.join();
}

WatchedGroup::WatchedGroup(std::unique_ptr<ReportExchange> reports,
                           const Options& options, Hooks hooks)
    : options_(options),
      reports_(std::move(reports)),
      watchdog_({std::move(hooks.health),
                 [this, stop = std::move(hooks.stop)](
                     const OperationWatchdog::Failure& failure) {
                   // Half of the time is for waiters to hear of a search that
                   // found nobody.
                   reports_->Report(failure.report,
                                    options_.diagnosis_timeout / 2);
                   stop(failure);
                 },
                 std::move(hooks.enter)}) {}

WatchedGroup::~WatchedGroup() {
  watchdog_.Stop();
  reports_->Stop();
}

absl::Status WatchedGroup::Start() {
  FSDP_RETURN_IF_ERROR(watchdog_.Start(kWatchInterval));
  return reports_->Start([this] {
    watchdog_.Fail(FailureOf(Cause::kEcho, "another rank has failed"));
  });
}

absl::StatusOr<std::shared_ptr<WatchedGroup::Operation>> WatchedGroup::Begin(
    Call call, int64_t bytes) {
  auto operation =
      watchdog_.Begin(std::move(call), bytes, absl::Now() + options_.timeout);
  if (failed()) return ErrorOf(*operation);
  return operation;
}

void WatchedGroup::Launched(Operation& operation,
                            OperationWatchdog::Query is_done) {
  watchdog_.Launched(operation, std::move(is_done));
}

absl::Status WatchedGroup::NotLaunched(const Operation& operation,
                                       const absl::Status& why) {
  watchdog_.Fail(why);
  return ErrorOf(operation);
}

void WatchedGroup::Keep(Operation& operation, std::shared_ptr<void> what) {
  watchdog_.Keep(operation, std::move(what));
}

absl::Status WatchedGroup::Wait(const Operation& operation,
                                absl::Time deadline) {
  absl::Duration pause = absl::Microseconds(5);
  while (true) {
    switch (watchdog_.StateOf(operation)) {
      case OperationWatchdog::State::kDone:
        return absl::OkStatus();
      case OperationWatchdog::State::kFailed:
        return ErrorOf(operation);
      case OperationWatchdog::State::kRunning:
        break;
    }
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      watchdog_.Fail(FailureOf(Cause::kDeadline, kLate));
      continue;
    }
    absl::SleepFor(std::min(pause, deadline - now));
    pause = std::min(pause * 2, absl::Microseconds(200));
  }
}

absl::Status WatchedGroup::Check(const Operation& operation) {
  if (failed() &&
      watchdog_.StateOf(operation) == OperationWatchdog::State::kFailed) {
    return ErrorOf(operation);
  }
  return absl::OkStatus();
}

void WatchedGroup::Abort(const absl::Status& reason) {
  watchdog_.Fail(FailureOf(Cause::kAbort, reason.message()));
}

void WatchedGroup::Fail(const absl::Status& status) {
  watchdog_.Fail(status);
  watchdog_.AwaitStopped();
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
  watchdog_.Poll(absl::Now());
  while (!watchdog_.idle() && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
    watchdog_.Poll(absl::Now());
  }
  if (failed()) watchdog_.AwaitStopped();
  RankReport farewell;
  farewell.cause = Cause::kLeft;
  farewell.position = watchdog_.Position();
  // Peers must be able to read it when the library lets go of them.
  reports_->Leave(farewell);
  if (!watchdog_.idle()) {
    watchdog_.Fail(FailureOf(Cause::kLeft, "this rank has left the group"));
  }
  close();
  watchdog_.Stop();
  reports_->Stop();
}

absl::Status WatchedGroup::ErrorOf(const Operation& operation) {
  const absl::Status verdict = FindVerdict();
  return absl::Status(verdict.code(), absl::StrCat(Describe(operation), ": ",
                                                   verdict.message()));
}

std::string WatchedGroup::Describe(const Operation& operation) const {
  return operation.Describe(options_.names.Place(options_.rank));
}

absl::Status WatchedGroup::FindVerdict() {
  const OperationWatchdog::Failure failure = watchdog_.AwaitStopped();
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
