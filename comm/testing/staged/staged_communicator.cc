#include "comm/testing/staged/staged_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "comm/run_ranks/run_ranks.h"

namespace fsdp::comm {
namespace {

// How soon the thread sees that the group has failed.
constexpr absl::Duration kLookUp = absl::Milliseconds(10);

// How long a rank that leaves waits for copies that still run.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);

// A collective on a buffer in host memory, with the copies to it and back.
struct StagedCall {
  // A tensor of the device and its place in the buffer. Undefined: no copy.
  struct Part {
    at::Tensor tensor;
    int64_t begin = 0;  // in elements
  };

  std::string name;  // "all-gather of blocks.3 on rank 1 of 4"
  at::ScalarType dtype = at::kFloat;
  int64_t size = 0;  // of the buffer, in elements
  Part source;
  Part target;
  std::function<StartedWork(Communicator& host, const at::Tensor& buffer)> run;
  // Enqueues more work after the copy to `target`; may be empty.
  std::function<void()> finish;
};

at::Tensor Whole(const at::Tensor& tensor) {
  return RangeOf(tensor, 0, tensor.numel());
}

bool Moves(const StagedCall::Part& part) {
  return part.tensor.defined() && part.tensor.numel() > 0;
}

// The queue of one rank. Used by one thread at a time, except Abort(), which
// any thread may call. The first failure ends the group; later calls fail with
// the error that `host` gives.
class StagedQueue {
 public:
  // A call that was added.
  class Operation {
   public:
    explicit Operation(StagedCall call)
        : name_(call.name), call_(std::move(call)) {}

   private:
    friend class StagedQueue;

    // Takes the call out, whose tensors are then the caller's again.
    StagedCall Release() { return std::exchange(call_, StagedCall()); }

    const std::string name_;
    StagedCall call_;
    DeviceEvent begin_;  // of the caller's stream
    DeviceEvent end_;    // of the queue's, once it is_enqueued_
    bool is_enqueued_ = false;
    std::optional<absl::Status> result_;  // once it is done
  };

  // Takes tensors on `device`, of the dtypes that `host` takes.
  StagedQueue(std::shared_ptr<Communicator> host, c10::Device device)
      : device_(device),
        own_name_(host->names().Name(host->rank())),
        timeout_(host->default_timeout()),
        stream_(device),
        host_(std::move(host)),
        thread_(ValueOrThrow(
            StartThread("for staged collectives", [this] { Run(); }))) {}
  ~StagedQueue() { Leave(); }
  StagedQueue(const StagedQueue&) = delete;
  StagedQueue& operator=(const StagedQueue&) = delete;

  // Leaves the group: aborts calls that `host` has not done and destroys it.
  void Leave() {
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

  // Adds a call, which runs after all work that the current stream of the
  // device has been given so far.
  absl::StatusOr<std::shared_ptr<Operation>> Add(StagedCall call) {
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

  // These do what Work's methods do.
  absl::Status Wait(Operation& operation, absl::Time deadline) {
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

  absl::Status BlockCurrentStream(Operation& operation) {
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

  // Splits `host` after the calls so far.
  CreatedCommunicator SplitHost(int color, int key) {
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

  void Abort(const absl::Status& reason) {
    NoteFailure(reason);
    std::shared_ptr<Communicator> host;
    {
      absl::MutexLock lock(&mutex_);
      host = host_;
    }
    if (host != nullptr) host->Abort(reason);
  }

 private:
  // A copy that still runs, and what it copies.
  struct Unfinished {
    DeviceEvent end;
    StagedCall call;
  };

  void Run() {
    const c10::NoGradGuard no_grad;
    while (const std::shared_ptr<Operation> operation = Next()) {
      Finish(*operation, Execute(*operation));
    }
  }

  std::shared_ptr<Operation> Next() {
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

  absl::Status Execute(Operation& operation) {
    absl::Status status = CopyToHost(operation);
    if (status.ok()) status = RunOnHost(operation.call_);
    {
      absl::MutexLock lock(&mutex_);
      --not_done_by_host_;
    }
    if (status.ok()) status = CopyFromHost(operation);
    return status;
  }

  absl::Status CopyToHost(Operation& operation) {
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

  absl::Status RunOnHost(const StagedCall& call) {
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

  absl::Status CopyFromHost(Operation& operation) {
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
  absl::Status EnqueueResult(Operation& operation, DeviceEvent& end) {
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
  void Finish(Operation& operation, absl::Status status) {
    {
      StagedCall done;  // destroyed without the lock
      absl::MutexLock lock(&mutex_);
      done = operation.Release();
    }
    absl::MutexLock lock(&mutex_);
    if (!operation.result_) operation.result_ = std::move(status);
  }

  // Waits for `event`. Returns false if the timeout or a failure came first.
  absl::StatusOr<bool> Poll(const DeviceEvent& event, absl::string_view what) {
    const absl::Time deadline = absl::Now() + timeout_;
    bool done = false;
    do {
      FSDP_RETURN_IF_ERROR(TorchToStatus(what, [&] {
        done = event.Wait(std::min(deadline, absl::Now() + kLookUp));
      }));
    } while (!done && !HasFailed() && absl::Now() < deadline);
    return done;
  }

  at::Tensor Buffer(const StagedCall& call) {
    const auto bytes =
        call.size * static_cast<int64_t>(c10::elementSize(call.dtype));
    if (!memory_.defined() || memory_.numel() < bytes) {
      memory_ = at::Tensor();
      memory_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(
                                       HasStreams(device_)));
    }
    return RangeOf(memory_, call.dtype, 0, call.size);
  }

  bool HasFailed() {
    absl::MutexLock lock(&mutex_);
    return !failure_.ok();
  }

  absl::Status Aborted(absl::string_view what) {
    absl::MutexLock lock(&mutex_);
    return absl::AbortedError(
        absl::StrCat(what, ": ", own_name_, " aborted: ", failure_.message()));
  }

  // Ends the group on this rank, without telling the peers.
  void NoteFailure(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = status;
  }

  const c10::Device device_;
  const std::string own_name_;  // "rank 1"
  const absl::Duration timeout_;

  // Only the thread uses these.
  SideStream stream_;
  DeviceEvent copied_;
  at::Tensor memory_;
  std::vector<Unfinished> unfinished_;

  absl::Mutex mutex_;
  std::shared_ptr<Communicator> host_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Operation>> waiting_ ABSL_GUARDED_BY(mutex_);
  int64_t not_done_by_host_ ABSL_GUARDED_BY(mutex_) = 0;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;
};

class StagedWork final : public Work {
 public:
  StagedWork(std::shared_ptr<StagedQueue> queue,
             std::shared_ptr<StagedQueue::Operation> operation)
      : queue_(std::move(queue)), operation_(std::move(operation)) {}

  absl::Status Wait(absl::Time deadline) override {
    return queue_->Wait(*operation_, deadline);
  }

  absl::Status BlockCurrentStream() override {
    return queue_->BlockCurrentStream(*operation_);
  }

 private:
  const std::shared_ptr<StagedQueue> queue_;
  const std::shared_ptr<StagedQueue::Operation> operation_;
};

// What a scaled sum becomes of `sum`, which may be `out`.
void Scale(const at::Tensor& out, const at::Tensor& sum, ScaledSum scaled) {
  if (scaled.accumulate) {
    out.add_(sum, scaled.scale);
    return;
  }
  if (out.data_ptr() != sum.data_ptr()) out.copy_(sum);
  if (scaled.scale != 1) out.mul_(scaled.scale);
}

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> host, c10::Device device)
      : device_(device),
        rank_(host->rank()),
        names_(host->names()),
        timeout_(host->default_timeout()),
        has_all_to_all_(host->HasAllToAll()),
        text_(absl::StrCat("staged on ", device.str(), " over ",
                           host->ToString())),
        queue_(std::make_shared<StagedQueue>(std::move(host), device)) {}
  ~StagedCommunicator() override { queue_->Leave(); }

  int rank() const override { return rank_; }
  int world_size() const override { return names_.size(); }
  const RankNames& names() const override { return names_; }
  absl::Duration default_timeout() const override { return timeout_; }
  std::string ToString() const override { return text_; }

  bool HasAllToAll() const override { return has_all_to_all_; }

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    return AllocatePlain(bytes, device_);
  }

  CreatedCommunicator Split(int color, int key) override {
    FSDP_RETURN_IF_ERROR(CheckColor(color));
    FSDP_ASSIGN_OR_RETURN(auto host, queue_->SplitHost(color, key));
    return CreateStagedCommunicator(std::move(host), device_);
  }

  void Abort(const absl::Status& reason) override { queue_->Abort(reason); }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    return Start(CallOf(args, label), args.out.device());
  }

  StartedWork DoScaledSum(const CollectiveArgs& args,
                          absl::string_view label) override {
    const int64_t n = args.out.numel();
    const at::Tensor scaled = RangeOf(args.out, 0, n);
    const bool is_direct = args.out.scalar_type() == args.in.scalar_type() &&
                           !args.scaled->accumulate;
    CollectiveArgs sum = args;
    sum.scaled.reset();
    sum.out = is_direct ? scaled : RangeOf(args.in, rank_ * n, n);
    StagedCall call = CallOf(sum, label);
    call.finish = [scaled, summed = sum.out, sum = *args.scaled] {
      Scale(scaled, summed, sum);
    };
    return Start(std::move(call), args.in.device());
  }

 private:
  // Makes the call of which the host's group does its part in a buffer.
  StagedCall CallOf(const CollectiveArgs& args, absl::string_view label) const {
    const bool is_one = !args.in.defined();
    const at::Tensor& in = is_one ? args.out : args.in;
    StagedCall call;
    call.name = absl::StrCat(CollectiveName(args.collective), " of ", label,
                             " on ", Place());
    call.dtype = in.scalar_type();
    call.size = args.whole().numel();
    call.source = {in, 0};
    call.target = {args.out, 0};
    if (args.collective == Collective::kAllGather) {
      call.source.begin = rank_ * in.numel();
    } else if (args.collective == Collective::kReduceScatter) {
      call.target.begin = rank_ * args.out.numel();
    } else if (args.collective == Collective::kAllToAll) {
      call.target.begin = in.numel();
      call.size = 2 * in.numel();
    } else if (args.collective == Collective::kBroadcast) {
      // What is overwritten need not come, and what is there need not go back.
      (rank_ == args.root ? call.target : call.source).tensor = at::Tensor();
    }
    // Holds none of the tensors.
    const CollectiveArgs shape{args.collective, {}, {}, args.op, args.root};
    call.run = [shape, is_one, label = std::string(label),
                from = call.source.begin, in_size = in.numel(),
                to = call.target.begin, out_size = args.out.numel()](
                   Communicator& host, const at::Tensor& buffer) {
      CollectiveArgs staged = shape;
      staged.out = RangeOf(buffer, to, out_size);
      if (!is_one) staged.in = RangeOf(buffer, from, in_size);
      return host.StartCollective(staged, label);
    };
    return call;
  }

  StartedWork Start(StagedCall call, c10::Device device) {
    if (device != device_) {
      return absl::UnimplementedError(
          absl::StrCat(call.name, ": this group takes tensors on ",
                       device_.str(), ", not ", device.str()));
    }
    FSDP_ASSIGN_OR_RETURN(auto operation, queue_->Add(std::move(call)));
    return std::make_unique<StagedWork>(queue_, std::move(operation));
  }

  const c10::Device device_;
  const int rank_;
  const RankNames names_;
  const absl::Duration timeout_;
  const bool has_all_to_all_;
  const std::string text_;
  const std::shared_ptr<StagedQueue> queue_;
};

}  // namespace

CreatedCommunicator CreateStagedCommunicator(std::unique_ptr<Communicator> host,
                                             c10::Device device) {
  if (host == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "stage collectives on ", device.str(), ": there is no host group"));
  }
  if (!device.is_cpu() && !device.has_index()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "stage collectives on ", device.str(),
        ": say which one by its index, as in ", device.str(), ":0"));
  }
  std::unique_ptr<Communicator> staged;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      [&] { return absl::StrCat("stage collectives on ", device.str()); },
      [&] {
        staged = std::make_unique<StagedCommunicator>(std::move(host), device);
      }));
  return staged;
}

ConnectDevice StagedBackend(c10::Device device) {
  return [device](const DeviceMeeting& meeting) -> CreatedCommunicator {
    c10::Device own = device;
    if (!own.has_index()) {
      FSDP_ASSIGN_OR_RETURN(own,
                            DeviceOfRank(device.type(), meeting.local_rank));
    }
    FSDP_ASSIGN_OR_RETURN(auto host,
                          meeting.host.Split(/*color=*/0, meeting.host.rank()));
    return CreateStagedCommunicator(std::move(host), own);
  };
}

}  // namespace fsdp::comm
