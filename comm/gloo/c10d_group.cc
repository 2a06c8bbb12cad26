#include "comm/gloo/c10d_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {
namespace {

// How long a wait that has failed stays for the worker to let go of the
// buffers: it is between two messages or adding up a chunk.
constexpr absl::Duration kLetGo = absl::Seconds(5);

}  // namespace

// `run` belongs to the worker once posted; the rest is guarded by the group's
// mutex.
class C10dGroup::Operation {
 public:
  Operation(Call call_in, int64_t sequence_in, Run run_in)
      : call(std::move(call_in)),
        sequence(sequence_in),
        run(std::move(run_in)) {}

  const Call call;
  const int64_t sequence;
  Run run;
  bool done = false;
  bool succeeded = false;
};

C10dGroup::C10dGroup(int rank, int world_size,
                     std::unique_ptr<MessageTransport> transport,
                     absl::Duration diagnosis_timeout)
    : rank_(rank),
      world_size_(world_size),
      diagnosis_timeout_(diagnosis_timeout),
      messages_(std::make_unique<PeerMessages>(std::move(transport))),
      calls_(std::make_unique<CallExchange>(rank, world_size, messages_.get())),
      collectives_(rank, world_size, messages_.get()) {}

absl::StatusOr<std::shared_ptr<C10dGroup>> C10dGroup::Create(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::unique_ptr<MessageTransport> transport,
    absl::Duration diagnosis_timeout) {
  std::shared_ptr<C10dGroup> group(
      new C10dGroup(rank, world_size, std::move(transport), diagnosis_timeout));
  FSDP_ASSIGN_OR_RETURN(group->monitor_,
                        GroupMonitor::Create(store, rank, world_size));
  FSDP_RETURN_IF_ERROR(group->calls_->Start());
  FSDP_RETURN_IF_ERROR(group->monitor_->Start([raw = group.get()] {
    raw->Fail(Cause::kEcho, "another rank has failed");
  }));
  FSDP_ASSIGN_OR_RETURN(group->worker_,
                        StartThread("for collectives", [raw = group.get()] {
                          raw->RunOperations();
                        }));
  return group;
}

C10dGroup::~C10dGroup() { Stop(); }

absl::StatusOr<std::shared_ptr<C10dGroup::Operation>> C10dGroup::Post(Call call,
                                                                      Run run) {
  std::shared_ptr<Operation> operation;
  {
    absl::MutexLock lock(&mutex_);
    operation = std::make_shared<Operation>(std::move(call), next_sequence_++,
                                            std::move(run));
    if (!failure_) {
      queue_.push_back(operation);
      return operation;
    }
  }
  return ErrorOf(*operation);
}

absl::Status C10dGroup::Wait(Operation& operation, absl::Time deadline) {
  const absl::Condition is_done(&operation.done);
  bool in_time = false;
  {
    absl::MutexLock lock(&mutex_);
    in_time = mutex_.AwaitWithDeadline(is_done, deadline);
    if (in_time && operation.succeeded) return absl::OkStatus();
  }
  if (!in_time) {
    Fail(Cause::kDeadline, "not done at the deadline");
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(is_done, kLetGo);
    if (operation.succeeded) return absl::OkStatus();
  }
  return ErrorOf(operation);
}

void C10dGroup::Abort(const absl::Status& reason) {
  Fail(Cause::kAbort, std::string(reason.message()));
}

void C10dGroup::Stop() {
  RankReport farewell;
  farewell.cause = Cause::kLeft;
  bool unfinished = false;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    stopping_ = true;
    farewell.position = PositionLocked();
    unfinished = current_ != nullptr || !queue_.empty();
  }
  // Before the connections close, so that whoever notices can read it.
  if (monitor_ != nullptr) monitor_->Leave(farewell);
  if (unfinished) Fail(Cause::kLeft, "this rank has left the group");
  if (worker_.joinable()) worker_.join();
  if (monitor_ != nullptr) monitor_->Stop();
  // Peers that still wait for this rank notice by the closed connections.
  calls_.reset();
  messages_.reset();
}

void C10dGroup::RunOperations() {
  const auto has_news = [this]() {
    mutex_.AssertHeld();
    return stopping_ || !queue_.empty();
  };
  while (true) {
    std::shared_ptr<Operation> operation;
    bool failed = false;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (queue_.empty()) return;
      operation = std::move(queue_.front());
      queue_.pop_front();
      current_ = operation;
      failed = failure_.has_value();
    }
    const bool succeeded = !failed && Execute(*operation).ok();
    // Before anyone is told: who waits may count on the buffers being its own.
    operation->run = nullptr;
    absl::MutexLock lock(&mutex_);
    current_ = nullptr;
    if (succeeded) last_finished_ = Name(operation->call, operation->sequence);
    operation->succeeded = succeeded;
    operation->done = true;
  }
}

absl::Status C10dGroup::Execute(Operation& operation) {
  absl::Status status = calls_->Announce(operation.sequence, operation.call);
  if (status.ok()) {
    status = operation.run(collectives_, [this] { return calls_->Agree(); });
  }
  if (absl::IsInvalidArgument(status)) {
    Fail(Cause::kMismatch, std::string(status.message()));
  } else if (!status.ok()) {
    Fail(Cause::kLost, std::string(status.message()));
  }
  return status;
}

void C10dGroup::Fail(Cause cause, std::string text) {
  RankReport report;
  report.cause = cause;
  report.text = std::move(text);
  {
    absl::MutexLock lock(&mutex_);
    if (failure_) return;
    report.position = PositionLocked();
    failure_ = report;
    failed_at_ = absl::Now();
  }
  // Leaves time for whoever waits to hear of a search that found nobody. Does
  // nothing for a rank that leaves: it has said so already.
  monitor_->Report(report, diagnosis_timeout_ / 2);
  messages_->Abort();
}

absl::Status C10dGroup::ErrorOf(const Operation& operation) {
  const absl::Status verdict = FindVerdict();
  return absl::Status(
      verdict.code(),
      absl::StrCat(Name(operation.call, operation.sequence), " on rank ", rank_,
                   " of ", world_size_, ": ", verdict.message()));
}

absl::Status C10dGroup::FindVerdict() {
  absl::Time until;
  {
    absl::MutexLock lock(&mutex_);
    if (verdict_) return *verdict_;
    until = failed_at_ + diagnosis_timeout_;
  }
  GroupMonitor::Findings findings = monitor_->Await(until);
  absl::MutexLock lock(&mutex_);
  if (!verdict_) {
    findings.reports[rank_] = failure_;
    verdict_ = Verdict(rank_, findings.reports, findings.store_answers);
  }
  return *verdict_;
}

std::string C10dGroup::PositionLocked() const {
  if (current_ != nullptr) {
    return absl::StrCat("is in ", Name(current_->call, current_->sequence));
  }
  if (last_finished_.empty()) return "has called nothing yet";
  return absl::StrCat("has finished ", last_finished_,
                      " and called nothing since");
}

}  // namespace fsdp::comm
