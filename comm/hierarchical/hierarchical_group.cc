#include "comm/hierarchical/hierarchical_group.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {
namespace {

// The longest time that a failed wait stays for the worker to let go of the
// buffers. The parts have been aborted by then.
constexpr absl::Duration kLetGo = absl::Seconds(10);

// Marks the failure of a rank in a text that the parts carry from rank to rank.
// Parts know only their own ranks, so that each rank tells all its parts.
constexpr absl::string_view kToldToAll = "told to all: ";

// Marks the text of a rank that has left with nothing unfinished. It matters
// only to ranks that wait for that rank.
constexpr absl::string_view kHasLeft = " has left the group";

std::optional<absl::Status> DecodeFailure(absl::string_view text) {
  const size_t mark = text.find(kToldToAll);
  if (mark == absl::string_view::npos) return std::nullopt;
  auto failure = DecodeStatus(text.substr(mark + kToldToAll.size()));
  if (failure.has_value() && failure->ok()) failure.reset();
  return failure;
}

// Returns the message without the part's name of the operation.
absl::string_view Reason(const Communicator& part, absl::string_view message) {
  const std::string end = absl::StrCat(" on ", part.Place(), ": ");
  const size_t found = message.find(end);
  if (found == absl::string_view::npos) return message;
  return message.substr(found + end.size());
}

}  // namespace

HierarchicalGroup::HierarchicalGroup(HierarchicalParts parts)
    : parts_(std::move(parts)),
      layout_{parts_.rail->world_size(), parts_.host->world_size()},
      rank_(parts_.network->rank()),
      names_(parts_.network->names()) {
  listener_ = std::make_unique<AbortListener>(
      parts_.network.get(), [this](const absl::Status& status) {
        const bool is_failure = DecodeFailure(status.message()).has_value() ||
                                !absl::StrContains(status.message(), kHasLeft);
        if (is_failure) FailWith(*parts_.network, status);
      });
}

absl::StatusOr<std::shared_ptr<HierarchicalGroup>> HierarchicalGroup::Create(
    HierarchicalParts parts) {
  std::shared_ptr<HierarchicalGroup> group(
      new HierarchicalGroup(std::move(parts)));
  absl::Status started = group->queue_.Start("for collectives between hosts");
  if (started.ok()) started = group->listener_->Begin();
  if (started.ok()) return group;
  group->Abort(started);
  return started;
}

HierarchicalGroup::~HierarchicalGroup() { Stop(); }

absl::StatusOr<std::shared_ptr<HierarchicalGroup::Operation>>
HierarchicalGroup::Post(const Call& call, Run run) {
  int64_t sequence = 0;
  {
    absl::MutexLock lock(&mutex_);
    sequence = next_sequence_++;
  }
  return PostUncounted(Name(call, sequence), std::move(run));
}

absl::StatusOr<std::shared_ptr<HierarchicalGroup::Operation>>
HierarchicalGroup::PostUncounted(const std::string& name, Run run) {
  auto operation = queue_.Post(
      name, [this, name, run = std::move(run)] { return Execute(name, run); });
  if (operation == nullptr) return ErrorOf(name);
  return operation;
}

absl::Status HierarchicalGroup::Wait(const Operation& operation,
                                     absl::Time deadline) {
  const auto give_up = [&] { GiveUp(operation); };
  if (queue_.Wait(operation, deadline, give_up, kLetGo)) {
    return absl::OkStatus();
  }
  return ErrorOf(OperationQueue::NameOf(operation));
}

// Fails the group because `operation` is late. A second wait, whose deadline
// has passed, asks the call for which the operation waits: it knows whom it
// lacks, and its part tells the others.
void HierarchicalGroup::GiveUp(const Operation& operation) {
  while (true) {
    Stage stage;
    {
      absl::MutexLock lock(&mutex_);
      if (failure_) return;
      stage = stage_;
    }
    // The stage is read first: an operation not done now was not done then.
    if (queue_.IsDone(operation)) return;
    if (stage.work == nullptr) {
      const absl::string_view text = "not done at the deadline";
      return Fail({absl::DeadlineExceededError(text),
                   absl::AbortedError(
                       absl::StrCat(names_.Name(rank_), " gave up: ", text))});
    }
    const absl::Status status = stage.work->Wait(absl::Now());
    if (!status.ok()) return FailWith(*stage.part, status);
    // The call is done after all; the operation goes on to the next one.
    const auto has_moved = [&] {
      mutex_.AssertHeld();
      return failure_ || stage_.work != stage.work;
    };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&has_moved));
  }
}

void HierarchicalGroup::Abort(const absl::Status& reason) {
  const absl::Status aborted = absl::AbortedError(
      absl::StrCat(names_.Name(rank_), " aborted: ", reason.message()));
  Fail({aborted, aborted});
}

void HierarchicalGroup::Stop() {
  const auto left = queue_.Finish();
  if (!left.has_value()) return;
  if (left->unfinished) {
    Fail({absl::UnavailableError("this rank has left the group"),
          absl::UnavailableError(absl::StrCat(names_.Name(rank_), kHasLeft,
                                              " in ", queue_.NameOfNext()))});
  }
  queue_.Join();
  parts_.network->Abort(
      absl::AbortedError(absl::StrCat(names_.Name(rank_), kHasLeft)));
  listener_.reset();
  parts_ = HierarchicalParts();
}

absl::Status HierarchicalGroup::Execute(absl::string_view name,
                                        const Run& run) {
  const c10::NoGradGuard no_grad;
  absl::Status status;
  const absl::Status thrown = TorchToStatus(name, [&] { status = run(*this); });
  if (!thrown.ok()) status = thrown;
  // Does nothing if a part has failed, which has been told already.
  if (!status.ok()) {
    Fail({status, absl::AbortedError(absl::StrCat(
                      names_.Name(rank_), " failed: ", status.message()))});
  }
  return status;
}

absl::Status HierarchicalGroup::Finish(std::vector<Started> works) {
  absl::Status first;
  for (Started& started : works) {
    const absl::Status status =
        FinishOne(*started.part, std::move(started.work));
    if (first.ok()) first = status;
  }
  return first;
}

absl::Status HierarchicalGroup::FinishOne(const Communicator& part,
                                          StartedWork started) {
  absl::Status status = started.status();
  if (status.ok()) {
    const std::shared_ptr<Work> work = *std::move(started);
    {
      absl::MutexLock lock(&mutex_);
      stage_ = {&part, work};
    }
    // Waits until Fail() aborts the part; see GiveUp().
    status = work->Wait(absl::InfiniteFuture());
    absl::MutexLock lock(&mutex_);
    stage_ = Stage();
  }
  if (!status.ok()) FailWith(part, status);
  return status;
}

CreatedCommunicator HierarchicalGroup::SplitNetwork(int color, int key) {
  FSDP_RETURN_IF_ERROR(listener_->End());
  FSDP_ASSIGN_OR_RETURN(auto part, parts_.network->Split(color, key));
  FSDP_RETURN_IF_ERROR(listener_->Begin());
  return part;
}

void HierarchicalGroup::Fail(Failure failure) {
  const absl::Status reason = absl::AbortedError(
      absl::StrCat(kToldToAll, EncodeStatus(failure.status_of_others)));
  {
    absl::MutexLock lock(&mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    queue_.Cancel();
  }
  for (auto* part : {&parts_.host, &parts_.rail, &parts_.network}) {
    (*part)->Abort(reason);
  }
}

void HierarchicalGroup::FailWith(const Communicator& part,
                                 const absl::Status& status) {
  if (const auto told = DecodeFailure(status.message()); told.has_value()) {
    return Fail({*told, *told});
  }
  // A part gives its ranks other numbers.
  const std::string text = names_.Adopt(Reason(part, status.message()));
  const absl::Status own(status.code(), text);
  switch (status.code()) {
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnavailable:
      return Fail({own, own});
    case absl::StatusCode::kDeadlineExceeded:
      return Fail({own, absl::AbortedError(absl::StrCat(
                            names_.Name(rank_), " gave up waiting for ",
                            queue_.NameOfNext(), ": ", text))});
    default:
      return Fail({own, absl::AbortedError(absl::StrCat(names_.Name(rank_),
                                                        " failed: ", text))});
  }
}

absl::Status HierarchicalGroup::ErrorOf(absl::string_view name) {
  absl::MutexLock lock(&mutex_);
  return absl::Status(failure_->status.code(),
                      absl::StrCat(name, " on ", names_.Place(rank_), ": ",
                                   failure_->status.message()));
}

}  // namespace fsdp::comm
