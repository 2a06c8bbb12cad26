#include "comm/local/rendezvous.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace fsdp::comm {

// Guarded by the rendezvous' mutex. But the last rank to enter reads `payloads`
// without it: nobody else touches them once all have entered.
class Rendezvous::Operation {
 public:
  Operation(int64_t sequence, int world_size)
      : sequence(sequence), calls(world_size), payloads(world_size) {}

  const int64_t sequence;
  std::vector<std::optional<Call>> calls;  // by rank
  std::vector<std::any> payloads;          // by rank
  int num_entered = 0;
  bool running = false;  // all have entered
  bool done = false;     // succeeded or failed
  bool failed = false;
};

Rendezvous::Rendezvous(RankNames names)
    : names_(std::move(names)),
      next_sequence_(world_size(), 0),
      last_call_(world_size()),
      left_(world_size(), false) {}

absl::StatusOr<std::shared_ptr<Rendezvous::Operation>> Rendezvous::Enter(
    int rank, const Call& call, std::any payload, const Action& action) {
  FSDP_CHECK(rank >= 0 && rank < world_size());
  std::shared_ptr<Operation> operation;
  {
    absl::MutexLock lock(&mutex_);
    const int64_t sequence = next_sequence_[rank]++;
    if (failure_) return ErrorLocked(rank, call, sequence);
    std::shared_ptr<Operation>& open = open_[sequence];
    if (open == nullptr) {
      open = std::make_shared<Operation>(sequence, world_size());
    }
    operation = open;
    last_call_[rank] = LastCall{call, sequence};
    operation->calls[rank] = call;
    operation->payloads[rank] = std::move(payload);
    ++operation->num_entered;
    FailOnMismatchLocked(rank, *operation);
    FailOnAbsenteesLocked(*operation);
    if (failure_) return ErrorLocked(rank, call, sequence);
    if (operation->num_entered < world_size()) return operation;
    operation->running = true;
    open_.erase(sequence);
  }
  action(operation->payloads);
  // Comes before anyone is told, since waiters then use the buffers again.
  operation->payloads.clear();
  absl::MutexLock lock(&mutex_);
  operation->done = true;
  return operation;
}

absl::Status Rendezvous::Wait(int rank,
                              const std::shared_ptr<Operation>& operation,
                              absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const absl::Condition is_done(&operation->done);
  if (!mutex_.AwaitWithDeadline(is_done, deadline)) {
    if (operation->running) {
      mutex_.Await(is_done);
    } else {
      std::vector<std::string> missing;
      for (int peer = 0; peer < world_size(); ++peer) {
        if (!operation->calls[peer]) missing.push_back(LastSeenLocked(peer));
      }
      const std::string text =
          absl::StrCat("not done at the deadline; still missing: ",
                       absl::StrJoin(missing, ", "));
      const std::string name =
          Name(*operation->calls[rank], operation->sequence);
      FailLocked({rank, absl::DeadlineExceededError(text),
                  absl::StrCat(names_.Name(rank), " gave up waiting for ", name,
                               ": ", text),
                  absl::StatusCode::kAborted});
    }
  }
  if (!operation->failed) return absl::OkStatus();
  return ErrorLocked(rank, *operation->calls[rank], operation->sequence);
}

void Rendezvous::Abort(int rank, const absl::Status& reason) {
  const std::string text =
      absl::StrCat(names_.Name(rank), " aborted: ", reason.message());
  absl::MutexLock lock(&mutex_);
  FailLocked(
      {rank, absl::AbortedError(text), text, absl::StatusCode::kAborted});
}

void Rendezvous::Leave(int rank) {
  absl::MutexLock lock(&mutex_);
  left_[rank] = true;
  // This is a copy, since FailLocked() empties `open_`.
  const auto open = open_;
  for (const auto& [sequence, operation] : open) {
    FailOnAbsenteesLocked(*operation);
  }
}

void Rendezvous::FailOnMismatchLocked(int rank, const Operation& operation) {
  bool equal = true;
  std::vector<std::string> calls;
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::optional<Call>& call = operation.calls[peer];
    if (call) equal = equal && *call == *operation.calls[rank];
    calls.push_back(absl::StrCat(names_.Name(peer), " called ",
                                 call ? ToString(*call) : "nothing yet"));
  }
  if (equal) return;
  const std::string text =
      absl::StrCat("the ranks' calls #", operation.sequence,
                   " differ: ", absl::StrJoin(calls, "; "));
  FailLocked({rank, absl::InvalidArgumentError(text), text,
              absl::StatusCode::kInvalidArgument});
}

void Rendezvous::FailOnAbsenteesLocked(const Operation& operation) {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (!left_[peer] || operation.calls[peer]) continue;
    const std::string text = absl::StrCat(
        LastSeenLocked(peer),
        " has left the group: its function has returned, or its communicator "
        "was destroyed");
    FailLocked({peer, absl::UnavailableError(text), text,
                absl::StatusCode::kUnavailable});
  }
}

void Rendezvous::FailLocked(Failure failure) {
  if (failure_) return;
  failure_ = std::move(failure);
  for (auto& [sequence, operation] : open_) {
    operation->failed = true;
    operation->done = true;
    operation->payloads.clear();
  }
  open_.clear();
}

std::string Rendezvous::LastSeenLocked(int rank) const {
  const std::optional<LastCall>& last = last_call_[rank];
  if (!last) return absl::StrCat(names_.Name(rank), " (no call so far)");
  return absl::StrCat(names_.Name(rank), " (last seen in ",
                      Name(last->call, last->sequence), ")");
}

absl::Status Rendezvous::ErrorLocked(int rank, const Call& call,
                                     int64_t sequence) const {
  const bool own = failure_->rank == rank;
  const absl::StatusCode code =
      own ? failure_->status.code() : failure_->code_of_others;
  const absl::string_view text =
      own ? failure_->status.message() : failure_->text;
  return absl::Status(code, absl::StrCat(Name(call, sequence), " on ",
                                         names_.Place(rank), ": ", text));
}

}  // namespace fsdp::comm
