#include "comm/gloo/message_group.h"

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

MessageGroup::MessageGroup(int rank, RankNames names,
                           std::unique_ptr<MessageTransport> transport,
                           absl::Duration diagnosis_timeout)
    : rank_(rank),
      names_(std::move(names)),
      diagnosis_timeout_(diagnosis_timeout),
      messages_(std::make_unique<PeerMessages>(std::move(transport))),
      calls_(std::make_unique<CallExchange>(rank, names_, messages_.get())),
      collectives_(rank, names_.size(), messages_.get()) {}

absl::StatusOr<std::shared_ptr<MessageGroup>> MessageGroup::Create(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, RankNames names,
    std::unique_ptr<MessageTransport> transport,
    absl::Duration diagnosis_timeout) {
  std::shared_ptr<MessageGroup> group(new MessageGroup(
      rank, std::move(names), std::move(transport), diagnosis_timeout));
  FSDP_ASSIGN_OR_RETURN(group->reports_, ReportExchange::Create(
                                             store, rank, group->world_size()));
  FSDP_RETURN_IF_ERROR(group->calls_->Start());
  FSDP_RETURN_IF_ERROR(group->reports_->Start([raw = group.get()] {
    raw->Fail(Cause::kEcho, "another rank has failed");
  }));
  FSDP_RETURN_IF_ERROR(group->queue_.Start("for collectives"));
  return group;
}

MessageGroup::~MessageGroup() { Stop(); }

absl::StatusOr<std::shared_ptr<MessageGroup::Operation>> MessageGroup::Post(
    Call call, Run run) {
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

absl::Status MessageGroup::Wait(const Operation& operation,
                                absl::Time deadline) {
  const auto give_up = [this] {
    Fail(Cause::kDeadline, "not done at the deadline");
  };
  if (queue_.Wait(operation, deadline, give_up, kLetGo)) {
    return absl::OkStatus();
  }
  return ErrorOf(OperationQueue::NameOf(operation));
}

void MessageGroup::Abort(const absl::Status& reason) {
  Fail(Cause::kAbort, std::string(reason.message()));
}

void MessageGroup::Stop() {
  const auto left = queue_.Finish();
  if (!left.has_value()) return;
  RankReport farewell;
  farewell.cause = Cause::kLeft;
  farewell.position = left->position;
  // Before the connections close, so that whoever notices can read it.
  if (reports_ != nullptr) reports_->Leave(farewell);
  if (left->unfinished) Fail(Cause::kLeft, "this rank has left the group");
  queue_.Join();
  if (reports_ != nullptr) reports_->Stop();
  // Peers that still wait for this rank notice by the closed connections.
  calls_.reset();
  messages_.reset();
}

absl::Status MessageGroup::Execute(const Call& call, int64_t sequence,
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

void MessageGroup::Fail(Cause cause, std::string text) {
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
  reports_->Report(report, diagnosis_timeout_ / 2);
  messages_->Abort();
}

absl::Status MessageGroup::ErrorOf(absl::string_view name) {
  const absl::Status verdict = FindVerdict();
  return absl::Status(
      verdict.code(),
      absl::StrCat(name, " on ", names_.Place(rank_), ": ", verdict.message()));
}

absl::Status MessageGroup::FindVerdict() {
  absl::Time until;
  {
    absl::MutexLock lock(&mutex_);
    if (verdict_) return *verdict_;
    until = failed_at_ + diagnosis_timeout_;
  }
  ReportExchange::Findings findings = reports_->Await(until);
  absl::MutexLock lock(&mutex_);
  if (!verdict_) {
    findings.reports[rank_] = failure_;
    verdict_ = Verdict(rank_, names_, findings.reports, findings.store_answers);
  }
  return *verdict_;
}

}  // namespace fsdp::comm
