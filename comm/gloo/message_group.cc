#include "comm/gloo/c10d_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {
namespace {

// How long a wait that has failed stays for the worker to let go of the
// buffers: it is between two messages or adding up a chunk.
constexpr absl::Duration kLetGo = absl::Seconds(5);

}  // namespace

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
  FSDP_RETURN_IF_ERROR(group->queue_.Start("for collectives"));
  return group;
}

C10dGroup::~C10dGroup() { Stop(); }

absl::StatusOr<std::shared_ptr<C10dGroup::Operation>> C10dGroup::Post(Call call,
                                                                      Run run) {
  std::string name;
  std::shared_ptr<Operation> operation;
  {
    // Operations are queued in the order of their numbers.
    absl::MutexLock lock(&mutex_);
    const int64_t sequence = next_sequence_++;
    name = Name(call, sequence);
    operation = queue_.Post(
        name, [this, call = std::move(call), sequence, run = std::move(run)] {
          return Execute(call, sequence, run);
        });
  }
  if (operation == nullptr) return ErrorOf(name);
  return operation;
}

absl::Status C10dGroup::Wait(const Operation& operation, absl::Time deadline) {
  const auto give_up = [this] {
    Fail(Cause::kDeadline, "not done at the deadline");
  };
  if (queue_.Wait(operation, deadline, give_up, kLetGo)) {
    return absl::OkStatus();
  }
  return ErrorOf(OperationQueue::NameOf(operation));
}

void C10dGroup::Abort(const absl::Status& reason) {
  Fail(Cause::kAbort, std::string(reason.message()));
}

void C10dGroup::Stop() {
  const auto left = queue_.Finish();
  if (!left.has_value()) return;
  RankReport farewell;
  farewell.cause = Cause::kLeft;
  farewell.position = left->position;
  // Before the connections close, so that whoever notices can read it.
  if (monitor_ != nullptr) monitor_->Leave(farewell);
  if (left->unfinished) Fail(Cause::kLeft, "this rank has left the group");
  queue_.Join();
  if (monitor_ != nullptr) monitor_->Stop();
  // Peers that still wait for this rank notice by the closed connections.
  calls_.reset();
  messages_.reset();
}

absl::Status C10dGroup::Execute(const Call& call, int64_t sequence,
                                const Run& run) {
  absl::Status status = calls_->Announce(sequence, call);
  if (status.ok()) {
    status = run(collectives_, [this] { return calls_->Agree(); });
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
    report.position = queue_.Cancel();
    failure_ = report;
    failed_at_ = absl::Now();
  }
  // Leaves time for whoever waits to hear of a search that found nobody. Does
  // nothing for a rank that leaves: it has said so already.
  monitor_->Report(report, diagnosis_timeout_ / 2);
  messages_->Abort();
}

absl::Status C10dGroup::ErrorOf(absl::string_view name) {
  const absl::Status verdict = FindVerdict();
  return absl::Status(verdict.code(),
                      absl::StrCat(name, " on rank ", rank_, " of ",
                                   world_size_, ": ", verdict.message()));
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

}  // namespace fsdp::comm
