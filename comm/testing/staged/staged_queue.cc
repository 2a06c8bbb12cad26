#include "comm/testing/staged/staged_queue.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"

namespace fsdp::comm {
namespace {

// How soon the thread sees that the group has failed.
constexpr absl::Duration kLookUp = absl::Milliseconds(10);

// How long a rank that leaves waits for copies that still run.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);

at::Tensor Whole(const at::Tensor& tensor) {
  return RangeOf(tensor, 0, tensor.numel());
}

bool Moves(const StagedCall::Part& part) {
  return part.tensor.defined() && part.tensor.numel() > 0;
}

}  // namespace

StagedQueue::StagedQueue(std::shared_ptr<Communicator> host, c10::Device device)
    : device_(device),
      own_name_(host->names().Name(host->rank())),
      timeout_(host->default_timeout()),
      stream_(device),
      host_(std::move(host)),
      thread_(ValueOrThrow(
          StartThread("for staged collectives", [this] { Run(); }))) {}

StagedQueue::~StagedQueue() { Leave(); }

void StagedQueue::Leave() {
  if (!thread_.joinable()) return;
  bool is_busy = false;
  {
    absl::MutexLock lock(&mutex_);
    leaving_ = true;
    is_busy = not_done_by_host_ > 0;
  }
  if (is_busy) Abort(absl::CancelledError("this rank has left the group"));
  thread_.join();
  const absl::Time deadline = absl::Now() + kLeaveTimeout;
  for (const Unfinished& copy : unfinished_) {
    // A device that fails has told whoever waited.
    TorchToStatus("leave a staged group", [&] {
      copy.end.Wait(deadline);
    }).IgnoreError();
  }
  unfinished_.clear();
  memory_ = at::Tensor();
  std::shared_ptr<Communicator> host;
  absl::MutexLock lock(&mutex_);
  host.swap(host_);
}

absl::StatusOr<std::shared_ptr<StagedQueue::Operation>> StagedQueue::Add(
    StagedCall call) {
  auto operation = std::make_shared<Operation>(std::move(call));
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      operation->name_, [&] { operation->begin_.Record(device_); }));
  bool has_failed = false;
  {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(operation);
    ++not_done_by_host_;
    has_failed = !failure_.ok();
  }
  if (has_failed) {
    FSDP_RETURN_IF_ERROR(Wait(*operation, absl::InfiniteFuture()));
  }
  return operation;
}

absl::Status StagedQueue::Wait(Operation& operation, absl::Time deadline) {
  const auto is_done = [&operation] { return operation.result_.has_value(); };
  absl::Status late;
  {
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithDeadline(absl::Condition(&is_done), deadline)) {
      return *operation.result_;
    }
    late = absl::DeadlineExceededError(
        absl::StrCat(operation.name_, ": not done at the deadline"));
    operation.result_ = late;
  }
  Abort(late);
  return late;
}

absl::Status StagedQueue::BlockCurrentStream(Operation& operation) {
  const auto is_ordered = [&operation] {
    return operation.is_enqueued_ || operation.result_.has_value();
  };
  StagedCall done;
  {
    absl::MutexLock lock(&mutex_);
    // The thread gives up when a call takes too long.
    mutex_.Await(absl::Condition(&is_ordered));
    if (operation.result_) return *operation.result_;
    done = operation.Release();
  }
  return TorchToStatus(operation.name_,
                       [&] { operation.end_.BlockCurrentStream(); });
}

CreatedCommunicator StagedQueue::SplitHost(int color, int key) {
  const auto is_idle = [this] {
    mutex_.AssertHeld();
    return not_done_by_host_ == 0;
  };
  std::shared_ptr<Communicator> host;
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_idle));
    host = host_;
  }
  return host->Split(color, key);
}

void StagedQueue::Abort(const absl::Status& reason) {
  NoteFailure(reason);
  std::shared_ptr<Communicator> host;
  {
    absl::MutexLock lock(&mutex_);
    host = host_;
  }
  if (host != nullptr) host->Abort(reason);
}

void StagedQueue::Run() {
  const c10::NoGradGuard no_grad;
  while (const std::shared_ptr<Operation> operation = Next()) {
    Finish(*operation, Execute(*operation));
  }
}

std::shared_ptr<StagedQueue::Operation> StagedQueue::Next() {
  const auto is_wanted = [this] {
    mutex_.AssertHeld();
    return leaving_ || !waiting_.empty();
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&is_wanted));
  if (waiting_.empty()) return nullptr;
  std::shared_ptr<Operation> next = std::move(waiting_.front());
  waiting_.pop_front();
  return next;
}

absl::Status StagedQueue::Execute(Operation& operation) {
  absl::Status status = CopyToHost(operation);
  if (status.ok()) status = RunOnHost(operation.call_);
  {
    absl::MutexLock lock(&mutex_);
    --not_done_by_host_;
  }
  if (status.ok()) status = CopyFromHost(operation);
  return status;
}

absl::Status StagedQueue::CopyToHost(Operation& operation) {
  // Then the host's communicator says so.
  if (HasFailed()) return absl::OkStatus();
  const StagedCall& call = operation.call_;
  absl::Status status = TorchToStatus(call.name, [&] {
    const SideStream::Scope scope(stream_);
    operation.begin_.BlockCurrentStream();
    const StagedCall::Part& source = call.source;
    if (Moves(source)) {
      RangeOf(Buffer(call), source.begin, source.tensor.numel())
          .copy_(Whole(source.tensor), /*non_blocking=*/true);
    }
    copied_.Record(device_);
  });
  if (status.ok()) {
    const absl::StatusOr<bool> copied = Poll(copied_, call.name);
    if (copied.ok() && (*copied || HasFailed())) return absl::OkStatus();
    status =
        copied.ok()
            ? absl::DeadlineExceededError(absl::StrCat(
                  call.name, ": the device has not computed its input after ",
                  absl::FormatDuration(timeout_)))
            : copied.status();
  }
  Abort(status);
  return status;
}

absl::Status StagedQueue::RunOnHost(const StagedCall& call) {
  std::shared_ptr<Communicator> host;
  {
    absl::MutexLock lock(&mutex_);
    host = host_;
  }
  at::Tensor buffer;
  absl::Status status =
      TorchToStatus(call.name, [&] { buffer = Buffer(call); });
  if (status.ok()) {
    auto work = call.run(*host, buffer);
    if (work.ok()) {
      status = (*work)->Wait(absl::Now() + timeout_);
      if (!status.ok()) NoteFailure(status);
      return status;
    }
    status = work.status();
  }
  Abort(status);
  return status;
}

absl::Status StagedQueue::CopyFromHost(Operation& operation) {
  const std::string& name = operation.name_;
  if (HasFailed()) return Aborted(name);
  DeviceEvent end;
  absl::Status status = EnqueueResult(operation, end);
  if (!status.ok()) {
    Abort(status);
    return status;
  }
  const absl::StatusOr<bool> done = Poll(end, name);
  if (done.ok() && *done) return absl::OkStatus();
  status = done.status();
  if (done.ok()) {
    status = HasFailed()
                 ? Aborted(name)
                 : absl::DeadlineExceededError(absl::StrCat(
                       name, ": the device has not taken the result after ",
                       absl::FormatDuration(timeout_)));
  }
  Abort(status);
  absl::MutexLock lock(&mutex_);
  unfinished_.push_back({std::move(end), operation.Release()});
  return status;
}

// From then on the tensors may be the caller's.
absl::Status StagedQueue::EnqueueResult(Operation& operation,
                                        DeviceEvent& end) {
  FSDP_RETURN_IF_ERROR(TorchToStatus(operation.name_, [&] {
    const StagedCall& call = operation.call_;
    const SideStream::Scope scope(stream_);
    const StagedCall::Part& target = call.target;
    if (Moves(target)) {
      Whole(target.tensor)
          .copy_(RangeOf(Buffer(call), target.begin, target.tensor.numel()),
                 /*non_blocking=*/true);
      if (call.finish) call.finish();
    }
    operation.end_.Record(device_);
    end.Record(device_);
  }));
  absl::MutexLock lock(&mutex_);
  operation.is_enqueued_ = true;
  return absl::OkStatus();
}

// Whoever has waited for an operation has back what it held.
void StagedQueue::Finish(Operation& operation, absl::Status status) {
  {
    StagedCall done;  // destroyed without the lock
    absl::MutexLock lock(&mutex_);
    done = operation.Release();
  }
  absl::MutexLock lock(&mutex_);
  if (!operation.result_) operation.result_ = std::move(status);
}

absl::StatusOr<bool> StagedQueue::Poll(const DeviceEvent& event,
                                       absl::string_view what) {
  const absl::Time deadline = absl::Now() + timeout_;
  bool done = false;
  do {
    FSDP_RETURN_IF_ERROR(TorchToStatus(what, [&] {
      done = event.Wait(std::min(deadline, absl::Now() + kLookUp));
    }));
  } while (!done && !HasFailed() && absl::Now() < deadline);
  return done;
}

at::Tensor StagedQueue::Buffer(const StagedCall& call) {
  const auto bytes =
      call.size * static_cast<int64_t>(c10::elementSize(call.dtype));
  if (!memory_.defined() || memory_.numel() < bytes) {
    memory_ = at::Tensor();
    memory_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(
                                     HasStreams(device_)));
  }
  return RangeOf(memory_, call.dtype, 0, call.size);
}

bool StagedQueue::HasFailed() {
  absl::MutexLock lock(&mutex_);
  return !failure_.ok();
}

absl::Status StagedQueue::Aborted(absl::string_view what) {
  absl::MutexLock lock(&mutex_);
  return absl::AbortedError(
      absl::StrCat(what, ": ", own_name_, " aborted: ", failure_.message()));
}

void StagedQueue::NoteFailure(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok()) failure_ = status;
}

}  // namespace fsdp::comm
