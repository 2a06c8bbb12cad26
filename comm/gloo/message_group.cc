#include "comm/gloo/message_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

constexpr int kAnnouncementTag = 0;

// Truncates the text, so that the field always ends with a zero.
template <size_t kSize>
void CopyText(absl::string_view text, char (&field)[kSize]) {
  std::memcpy(field, text.data(), std::min(text.size(), kSize - 1));
}

// Accepts any bytes that a peer has sent.
template <size_t kSize>
std::string TextOf(const char (&field)[kSize]) {
  return std::string(field, strnlen(field, kSize));
}

// The longest time that a failed wait stays for the worker to let go of the
// buffers. The worker is between two messages or adds up a chunk.
constexpr absl::Duration kLetGo = absl::Seconds(5);

}  // namespace

// The message that announces a call. Zeroed and without padding, it is compared
// byte by byte: all ranks run one program and have one byte order.
struct CallExchange::Announcement {
  int64_t sequence;
  int64_t count;
  uint64_t label_hash;  // of the whole label
  uint64_t collective;
  char dtype[16];
  char detail[16];
  char label[128];
};

CallExchange::CallExchange(int rank, RankNames names, PeerMessages* messages)
    : rank_(rank),
      names_(std::move(names)),
      messages_(messages),
      announcements_(names_.size(), Announcement{}),
      receives_(messages),
      sends_(messages) {
  static_assert(std::has_unique_object_representations_v<Announcement>);
}

CallExchange::~CallExchange() = default;

absl::Status CallExchange::Start() { return PostReceives(); }

absl::Status CallExchange::PostReceives() {
  for (int peer = 0; peer < names_.size(); ++peer) {
    if (peer == rank_) continue;
    FSDP_RETURN_IF_ERROR(messages_->Receive(peer, kAnnouncementTag,
                                            &announcements_[peer],
                                            sizeof(Announcement), &receives_));
  }
  return absl::OkStatus();
}

absl::Status CallExchange::Announce(int64_t sequence, const Call& call) {
  Announcement& own = announcements_[rank_];
  own = Announcement{};
  own.sequence = sequence;
  own.count = call.count;
  own.label_hash = Fnv1a(call.label);
  own.collective = static_cast<uint64_t>(call.collective);
  CopyText(call.dtype, own.dtype);
  CopyText(call.detail, own.detail);
  CopyText(call.label, own.label);
  for (int step = 1; step < names_.size(); ++step) {
    FSDP_RETURN_IF_ERROR(messages_->Send((rank_ + step) % names_.size(),
                                         kAnnouncementTag, &own, sizeof(own),
                                         &sends_));
  }
  return absl::OkStatus();
}

absl::Status CallExchange::Agree() {
  FSDP_RETURN_IF_ERROR(messages_->Await(&receives_));
  FSDP_RETURN_IF_ERROR(messages_->Await(&sends_));
  const Announcement& own = announcements_[rank_];
  const bool equal = std::all_of(
      announcements_.begin(), announcements_.end(), [&](const auto& other) {
        return std::memcmp(&own, &other, sizeof(own)) == 0;
      });
  if (equal) return PostReceives();
  std::vector<std::string> calls;
  for (int peer = 0; peer < names_.size(); ++peer) {
    const Announcement& other = announcements_[peer];
    const Call call{static_cast<Collective>(other.collective),
                    TextOf(other.label), TextOf(other.dtype), other.count,
                    TextOf(other.detail)};
    calls.push_back(
        absl::StrCat(names_.Name(peer), " called ", ToString(call)));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the ranks' calls #", own.sequence,
                   " differ: ", absl::StrJoin(calls, "; ")));
}

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
  // Peers must be able to read it when the connections close.
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
  // Half of the time is for waiters to hear of a search that found nobody. A
  // rank that leaves has reported already.
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
