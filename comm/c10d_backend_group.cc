#include "comm/c10d_backend_group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/c10d_status.h"
#include "comm/failure_report.h"

namespace fsdp::comm {
namespace {

// How often somebody looks whether the group is well.
constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);

// How long a group waits, from when it is closed, for the backend to let go of
// buffers and to end.
constexpr absl::Duration kPatience = absl::Seconds(5);

NcclWatchdog::Failure FailureOf(Cause cause, std::string text) {
  NcclWatchdog::Failure failure;
  failure.report.cause = cause;
  failure.report.text = std::move(text);
  return failure;
}

}  // namespace

C10dBackendGroup::C10dBackendGroup(c10::intrusive_ptr<c10d::Backend> backend,
                                   Options options)
    : backend_(std::move(backend)),
      options_(std::move(options)),
      completions_(options_.device, options_.host_waits),
      watchdog_({[] { return absl::OkStatus(); },
                 [this](const NcclWatchdog::Failure& failure) {
                   StopBackend(failure);
                 }}) {}

absl::StatusOr<std::shared_ptr<C10dBackendGroup>> C10dBackendGroup::Create(
    c10::intrusive_ptr<c10d::Backend> backend,
    const c10::intrusive_ptr<c10d::Store>& store, Options options) {
  FSDP_ASSIGN_OR_RETURN(
      auto monitor,
      GroupMonitor::Create(store, backend->getRank(), backend->getSize()));
  std::shared_ptr<C10dBackendGroup> group;
  FSDP_RETURN_IF_ERROR(C10dToStatus("take a stream", [&] {
    group.reset(new C10dBackendGroup(std::move(backend), std::move(options)));
  }));
  group->monitor_ = std::move(monitor);
  group->monitor_->Start([raw = group.get()] {
    raw->watchdog_.Fail(FailureOf(Cause::kEcho, "another rank has failed"));
  });
  group->watchdog_.Start(kWatchInterval);
  return group;
}

C10dBackendGroup::~C10dBackendGroup() { Leave(); }

void C10dBackendGroup::Leave() {
  {
    absl::MutexLock lock(&mutex_);
    if (left_) return;
    left_ = true;
  }
  watchdog_.Poll(absl::Now());
  RankReport farewell;
  farewell.cause = Cause::kLeft;
  farewell.position = watchdog_.Position();
  // Before the backend goes away, so that whoever notices can read it.
  monitor_->Leave(farewell);
  if (!watchdog_.idle()) {
    watchdog_.Fail(FailureOf(Cause::kLeft, "this rank has left the group"));
  } else if (options_.leave && !watchdog_.failure()) {
    // What cannot be left any more has ended.
    (void)C10dToStatus("leave a group", [this] { options_.leave(); });
  }
  completions_.Stop(Patience());
  watchdog_.Stop();
  monitor_->Stop();
}

absl::StatusOr<std::shared_ptr<C10dBackendGroup::Operation>>
C10dBackendGroup::Launch(Call call, int64_t bytes, Start start, Finish finish) {
  const auto entry =
      watchdog_.Begin(std::move(call), bytes, absl::Now() + options_.timeout);
  if (watchdog_.failure()) return ErrorOf(*entry);
  WorkPtr work;
  const absl::Status started = C10dToStatus(
      entry->Describe(rank(), world_size()), [&] { work = start(*backend_); });
  if (absl::IsUnimplemented(started)) {
    watchdog_.Launched(*entry, [] { return true; });
    return started;
  }
  if (!started.ok()) {
    watchdog_.Fail(started);
    return ErrorOf(*entry);
  }
  const auto completion =
      std::make_shared<C10dCompletion>(std::move(work), std::move(finish));
  completions_.Add(completion);
  watchdog_.Launched(*entry, [completion] { return completion->IsDone(); });
  return std::make_shared<Operation>(entry, completion);
}

absl::Status C10dBackendGroup::Wait(const Operation& operation,
                                    absl::Time deadline) {
  absl::Duration pause = absl::Microseconds(5);
  while (true) {
    switch (watchdog_.StateOf(*operation.entry_)) {
      case NcclWatchdog::State::kDone:
        return absl::OkStatus();
      case NcclWatchdog::State::kFailed: {
        const absl::Status error = ErrorOf(*operation.entry_);
        AwaitLetGo(*operation.completion_);
        return error;
      }
      case NcclWatchdog::State::kRunning:
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

absl::Status C10dBackendGroup::BlockCurrentStream(const Operation& operation) {
  if (watchdog_.failure() &&
      watchdog_.StateOf(*operation.entry_) == NcclWatchdog::State::kFailed) {
    return ErrorOf(*operation.entry_);
  }
  if (options_.host_waits) {
    FSDP_RETURN_IF_ERROR(Wait(operation, absl::Now() + options_.timeout));
  }
  return operation.completion_->BlockCurrentStream();
}

// Lets tensors go when the backend has, or after kPatience where it hangs.
struct C10dBackendGroup::Kept {
  ~Kept() { group->AwaitLetGo(*completion); }

  C10dBackendGroup* const group;
  const std::shared_ptr<C10dCompletion> completion;
  const std::vector<at::Tensor> tensors;
};

void C10dBackendGroup::Keep(const Operation& operation,
                            std::vector<at::Tensor> tensors) {
  watchdog_.Keep(*operation.entry_,
                 std::shared_ptr<Kept>(new Kept{this, operation.completion_,
                                                std::move(tensors)}));
}

absl::Duration C10dBackendGroup::Patience() {
  absl::MutexLock lock(&mutex_);
  if (!closed_at_) return kPatience;
  return std::max(absl::ZeroDuration(), *closed_at_ + kPatience - absl::Now());
}

void C10dBackendGroup::AwaitLetGo(const C10dCompletion& completion) {
  const absl::Time until = absl::Now() + Patience();
  while (!completion.HasLetGo() && absl::Now() < until) {
    absl::SleepFor(absl::Milliseconds(1));
  }
}

void C10dBackendGroup::Abort(const absl::Status& reason) {
  watchdog_.Fail(FailureOf(Cause::kAbort, std::string(reason.message())));
}

void C10dBackendGroup::StopBackend(const NcclWatchdog::Failure& failure) {
  // Leaves time for whoever waits to hear of a search that found nobody.
  monitor_->Report(failure.report, options_.diagnosis_timeout / 2);
  // What cannot be closed any more is closed.
  (void)C10dToStatus("close a group", [this] { options_.close(); });
  absl::MutexLock lock(&mutex_);
  closed_at_ = absl::Now();
}

absl::Status C10dBackendGroup::ErrorOf(const NcclWatchdog::Operation& entry) {
  const absl::Status verdict = FindVerdict();
  return absl::Status(verdict.code(),
                      absl::StrCat(entry.Describe(rank(), world_size()), ": ",
                                   verdict.message()));
}

absl::Status C10dBackendGroup::FindVerdict() {
  const NcclWatchdog::Failure failure = watchdog_.AwaitStopped();
  if (failure.status) return *failure.status;
  {
    absl::MutexLock lock(&mutex_);
    if (verdict_) return *verdict_;
  }
  GroupMonitor::Findings findings =
      monitor_->Await(absl::Now() + options_.diagnosis_timeout);
  absl::MutexLock lock(&mutex_);
  if (!verdict_) {
    findings.reports[rank()] = failure.report;
    verdict_ = Verdict(rank(), findings.reports, findings.store_answers);
  }
  return *verdict_;
}

}  // namespace fsdp::comm
