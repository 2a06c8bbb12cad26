#include "comm/group/watched_group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {
namespace {

constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);

OperationWatchdog::Failure FailureOf(Cause cause, std::string text) {
  OperationWatchdog::Failure failure;
  failure.report.cause = cause;
  failure.report.text = std::move(text);
  return failure;
}

}  // namespace

WatchedGroup::WatchedGroup(std::unique_ptr<ReportExchange> reports,
                           const Options& options, Hooks hooks)
    : options_(options),
      stop_(std::move(hooks.stop)),
      reports_(std::move(reports)),
      watchdog_({std::move(hooks.health),
                 [this](const OperationWatchdog::Failure& failure) {
                   StopAll(failure);
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
      watchdog_.Fail(FailureOf(Cause::kDeadline, "not done at the deadline"));
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
  watchdog_.Fail(FailureOf(Cause::kAbort, std::string(reason.message())));
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
  AwaitIdle(absl::Now() + patience);
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

// Waits for what is under way, since a program may end without waiting for it.
void WatchedGroup::AwaitIdle(absl::Time deadline) {
  watchdog_.Poll(absl::Now());
  while (!watchdog_.idle() && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
    watchdog_.Poll(absl::Now());
  }
  if (failed()) watchdog_.AwaitStopped();
}

void WatchedGroup::StopAll(const OperationWatchdog::Failure& failure) {
  // Half of the time is for waiters to hear of a search that found nobody.
  reports_->Report(failure.report, options_.diagnosis_timeout / 2);
  stop_();
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
