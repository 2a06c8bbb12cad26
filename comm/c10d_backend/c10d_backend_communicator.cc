#include "comm/c10d_backend/c10d_backend_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_watchdog.h"
#include "comm/split_members.h"
#include "device_ops/pack.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using C10dReduceOp = c10d::ReduceOp;

// The longest wait for a closed backend to let go of buffers and to end.
constexpr absl::Duration kPatience = absl::Seconds(5);

// Knows when one work of a c10d backend is done, be it one that makes the host
// wait or one that makes a stream wait. Thread-safe once Run() has returned.
class Completion {
 public:
  // `finish` runs after `work`. Each of them may be empty.
  Completion(WorkPtr work, std::function<void()> finish)
      : work_(std::move(work)), finish_(std::move(finish)) {}

  // Lets the host or the stream of `side` wait for the work, as the backend has
  // it, and calls `finish` on that stream. Call it once.
  void Run(SideStream& side) {
    status_ = C10dToStatus("a work of c10d failed", [&] {
      const SideStream::Scope scope(side);
      if (work_ != nullptr) work_->wait();
      const c10::NoGradGuard no_grad;
      if (finish_) finish_();
      done_.Record(side.device());
    });
    finish_ = nullptr;
    has_run_.store(true, std::memory_order_release);
  }

  // Returns true once all is done, or the work's error, even before Run() is
  // over.
  absl::StatusOr<bool> IsDone() const {
    if (has_run()) FSDP_RETURN_IF_ERROR(status_);
    bool done = false;
    FSDP_RETURN_IF_ERROR(C10dToStatus(
        "ask for an event", [&] { done = has_run() && done_.Done(); }));
    if (work_ == nullptr) return done;
    // A stream that waits does not report the work's error.
    FSDP_RETURN_IF_ERROR(C10dToStatus("a work of c10d failed", [&] {
      if (!work_->isCompleted()) return;
      const std::exception_ptr error = work_->exception();
      if (error != nullptr) std::rethrow_exception(error);
    }));
    return done;
  }

  // True once nothing uses the tensors any more, even after an error.
  bool HasLetGo() const {
    if (!has_run()) return false;
    bool done = false;
    const absl::Status asked =
        C10dToStatus("ask for an event", [&] { done = done_.Done(); });
    return done || !asked.ok();
  }

  // Makes the current stream wait. Call it after Run().
  absl::Status BlockCurrentStream() const {
    FSDP_RETURN_IF_ERROR(status_);
    return C10dToStatus("make a stream wait",
                        [&] { done_.BlockCurrentStream(); });
  }

  bool has_run() const { return has_run_.load(std::memory_order_acquire); }

 private:
  const WorkPtr work_;
  std::function<void()> finish_;
  DeviceEvent done_;
  absl::Status status_;
  std::atomic<bool> has_run_{false};  // the two above are set
};

// Runs completions in order: at once if works make a stream wait, on a thread
// if they make the host wait.
class CompletionQueue {
 public:
  // Throws a StatusError if no thread can be started.
  CompletionQueue(c10::Device device, bool host_waits)
      : state_(std::make_shared<State>(device)) {
    if (!host_waits) return;
    thread_ = ValueOrThrow(StartThread("to wait for a backend",
                                       [state = state_] { state->Run(); }));
  }

  ~CompletionQueue() { Stop(absl::ZeroDuration()); }

  void Add(std::shared_ptr<Completion> completion) {
    if (!thread_.joinable()) {
      completion->Run(state_->side);
      return;
    }
    absl::MutexLock lock(&state_->mutex);
    state_->queue.push_back(std::move(completion));
  }

  // Ends the thread, or leaves it behind if it is stuck in the backend for
  // longer than `patience`.
  void Stop(absl::Duration patience) {
    if (!thread_.joinable()) return;
    {
      absl::MutexLock lock(&state_->mutex);
      state_->stopping = true;
      if (!state_->mutex.AwaitWithTimeout(absl::Condition(&state_->ended),
                                          patience)) {
        thread_.detach();
        return;
      }
    }
    thread_.join();
  }

 private:
  // Shared with the thread.
  struct State {
    explicit State(c10::Device device)
        : side(device, SideStream::Priority::kHigh) {}

    void Run() {
      const auto has_news = [this]() {
        mutex.AssertHeld();
        return stopping || !queue.empty();
      };
      while (true) {
        std::shared_ptr<Completion> completion;
        {
          absl::MutexLock lock(&mutex);
          mutex.Await(absl::Condition(&has_news));
          if (queue.empty()) {
            ended = true;
            return;
          }
          completion = std::move(queue.front());
          queue.pop_front();
        }
        completion->Run(side);
      }
    }

    SideStream side;
    absl::Mutex mutex;
    std::deque<std::shared_ptr<Completion>> queue ABSL_GUARDED_BY(mutex);
    bool stopping ABSL_GUARDED_BY(mutex) = false;
    bool ended ABSL_GUARDED_BY(mutex) = false;
  };

  const std::shared_ptr<State> state_;
  std::thread thread_;  // where the host waits
};

// A failure ends the group: the backend is closed, and the peers hear of it by
// the store. Thread-safe, except that the caller orders the calls of Launch().
class Group {
 public:
  struct Operation {
    std::shared_ptr<WatchedGroup::Operation> entry;
    std::shared_ptr<Completion> completion;
    bool is_captured;
  };

  // Calls the backend. Returns nullptr if there is nothing to do.
  using Start = absl::FunctionRef<WorkPtr(c10d::Backend&)>;
  // Runs after the work, in any thread. May be empty.
  using Finish = std::function<void()>;

  // `connection` has a way to close. `host_waits` says whether the backend's
  // Work::wait() makes the host wait. No other group uses `store`.
  static absl::StatusOr<std::shared_ptr<Group>> Create(
      C10dConnection connection, bool host_waits, const StorePtr& store,
      RankNames names, const C10dBackendOptions& options) {
    const int rank = connection.backend->getRank();
    FSDP_ASSIGN_OR_RETURN(auto reports,
                          ReportExchange::Create(store, rank, names.size()));
    std::shared_ptr<Group> group;
    FSDP_RETURN_IF_ERROR(C10dToStatus("take a stream", [&] {
      group.reset(new Group(
          std::move(connection), host_waits,
          {rank, std::move(names), options.timeout, options.diagnosis_timeout},
          std::move(reports), options));
    }));
    FSDP_RETURN_IF_ERROR(group->watched_.Start());
    return group;
  }

  ~Group() { Leave(); }

  // Leaves the group: ends all operations, which fails the peers' operations
  // that need this rank.
  void Leave() {
    // If the host waits, the rank has waited for whatever it needs.
    const absl::Duration patience =
        host_waits_ ? absl::ZeroDuration() : kPatience;
    watched_.Leave(patience, [this] {
      if (connection_.leave && !watched_.failed()) {
        // An error means that the group has ended already.
        (void)C10dToStatus("leave a group", [this] { connection_.leave(); });
      }
      completions_.Stop(Patience());
    });
  }

  int rank() const { return watched_.rank(); }
  int world_size() const { return watched_.world_size(); }
  const RankNames& names() const { return watched_.names(); }
  absl::Duration timeout() const { return watched_.timeout(); }

  // Starts the next operation. Unimplemented: the backend has no such
  // operation; the group stays as it was. The watchdog takes an operation that
  // is captured into a graph for done; only BlockCurrentStream() may wait for
  // it.
  absl::StatusOr<std::shared_ptr<Operation>> Launch(Call call, int64_t bytes,
                                                    Start start,
                                                    Finish finish) {
    FSDP_ASSIGN_OR_RETURN(auto entry, watched_.Begin(std::move(call), bytes));
    WorkPtr work;
    bool is_captured = false;
    absl::Status started = C10dToStatus(watched_.Describe(*entry), [&] {
      is_captured = is_capturing_ && is_capturing_();
      work = start(*connection_.backend);
    });
    if (absl::IsUnimplemented(started)) {
      watched_.Launched(*entry, [] { return true; });
      return started;
    }
    if (!started.ok()) return watched_.NotLaunched(*entry, started);
    const auto completion =
        std::make_shared<Completion>(std::move(work), std::move(finish));
    completions_.Add(completion);
    if (is_captured) {
      watched_.Launched(*entry, [] { return true; });
    } else {
      watched_.Launched(*entry, [completion] { return completion->IsDone(); });
    }
    return std::make_shared<Operation>(
        Operation{std::move(entry), completion, is_captured});
  }

  // These do what Work's methods do. Wait() returns FailedPrecondition for an
  // operation that is captured.
  absl::Status Wait(const Operation& operation, absl::Time deadline) {
    if (operation.is_captured) {
      return absl::FailedPreconditionError(
          absl::StrCat(watched_.Describe(*operation.entry),
                       ": it is part of a graph and runs when that does; wait "
                       "for the stream that the graph is launched on"));
    }
    absl::Status status = watched_.Wait(*operation.entry, deadline);
    if (!status.ok()) AwaitLetGo(*operation.completion);
    return status;
  }

  absl::Status BlockCurrentStream(const Operation& operation) {
    FSDP_RETURN_IF_ERROR(watched_.Check(*operation.entry));
    if (host_waits_) {
      FSDP_RETURN_IF_ERROR(Wait(operation, absl::Now() + timeout()));
    }
    return operation.completion->BlockCurrentStream();
  }

  // Keeps `tensors` until `operation` is done.
  void Keep(const Operation& operation, std::vector<at::Tensor> tensors) {
    watched_.Keep(*operation.entry,
                  std::shared_ptr<Kept>(new Kept{this, operation.completion,
                                                 std::move(tensors)}));
  }

  // Fails the group on this rank's behalf.
  void Abort(const absl::Status& reason) { watched_.Abort(reason); }

 private:
  Group(C10dConnection connection, bool host_waits,
        const WatchedGroup::Options& watched,
        std::unique_ptr<ReportExchange> reports,
        const C10dBackendOptions& options)
      : connection_(std::move(connection)),
        host_waits_(host_waits),
        device_(options.device),
        is_capturing_(options.is_capturing),
        completions_(device_, host_waits_),
        watched_(std::move(reports), watched,
                 {[] { return absl::OkStatus(); },
                  [this] {
                    // An error means that the group is closed already.
                    (void)C10dToStatus("close a group",
                                       [this] { connection_.close(); });
                    absl::MutexLock lock(&mutex_);
                    closed_at_ = absl::Now();
                  },
                  [this] { EnterDevice(); }}) {}

  // Keeps tensors until the backend lets go of them or has hung for kPatience.
  struct Kept {
    ~Kept() { group->AwaitLetGo(*completion); }

    Group* const group;
    const std::shared_ptr<Completion> completion;
    const std::vector<at::Tensor> tensors;
  };

  // Returns how much longer the backend may take to release buffers.
  absl::Duration Patience() {
    absl::MutexLock lock(&mutex_);
    if (!closed_at_) return kPatience;
    return std::max(absl::ZeroDuration(),
                    *closed_at_ + kPatience - absl::Now());
  }

  void AwaitLetGo(const Completion& completion) {
    const absl::Time until = absl::Now() + Patience();
    while (!completion.HasLetGo() && absl::Now() < until) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  // Makes the group's device the thread's current one. A thread begins with
  // device 0, and LibTorch would set that up when it goes back to it.
  void EnterDevice() {
    if (device_.is_cpu()) return;
    // Other calls report a device that has failed.
    (void)C10dToStatus("choose a device", [this] {
      c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
    });
  }

  const C10dConnection connection_;
  const bool host_waits_;
  const c10::Device device_;
  const std::function<bool()> is_capturing_;
  CompletionQueue completions_;
  absl::Mutex mutex_;
  std::optional<absl::Time> closed_at_ ABSL_GUARDED_BY(mutex_);
  // The last, so that its threads end first.
  WatchedGroup watched_;
};

// The time that c10d has beyond the group's deadline: an operation that c10d
// ends first ends without a reason.
constexpr absl::Duration kGrace = absl::Minutes(1);

C10dReduceOp ToC10d(ReduceOp op) {
  if (op == ReduceOp::kSum) return C10dReduceOp::SUM;
  return op == ReduceOp::kMin ? C10dReduceOp::MIN : C10dReduceOp::MAX;
}

// Returns a view as bytes: data that only moves needs no dtype, and some
// backends lack a few.
at::Tensor Bytes(const at::Tensor& tensor) { return tensor.view(at::kByte); }

class C10dBackendCommunicator final : public Communicator {
 public:
  C10dBackendCommunicator(std::string name, std::shared_ptr<Group> group,
                          StorePtr store, C10dBackendOptions options)
      : name_(std::move(name)),
        group_(std::move(group)),
        store_(std::move(store)),
        options_(std::move(options)) {}
  ~C10dBackendCommunicator() override {
    if (unwinds()) group_->Abort(EndedByException());
    group_->Leave();
  }

  int rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  const RankNames& names() const override { return group_->names(); }
  absl::Duration default_timeout() const override { return options_.timeout; }
  std::string ToString() const override {
    return absl::StrCat("c10d's ", name_, " on ", options_.device.str(), ", ",
                        Place());
  }

  // Scales inputs as comm/nccl/nccl_communicator.h does; on the CPU, sums keep
  // their bits.
  bool PrefersScaledInputs() const override {
    return !options_.device.is_cpu();
  }

  bool CanBeCaptured() const override {
    return options_.is_capturing != nullptr;
  }

  bool HasAllToAll() const override { return options_.has_all_to_all; }
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    return AllocatePlain(bytes, options_.device);
  }

  CreatedCommunicator Split(int color, int key) override;
  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    return Launch(args, label, {args.out, args.in}, nullptr);
  }

  StartedWork DoScaledSum(const CollectiveArgs& args,
                          absl::string_view label) override {
    const ScaledSum scaled = *args.scaled;
    const bool is_direct =
        args.out.scalar_type() == args.in.scalar_type() && !scaled.accumulate;
    CollectiveArgs sum = args;
    if (!is_direct) {
      const int64_t n = args.out.numel();
      sum.out = args.in.narrow(0, rank() * n, n);
    }
    const auto finish = [out = args.out, result = sum.out, scaled, is_direct] {
      if (scaled.accumulate) {
        out.add_(result, scaled.scale);
      } else if (!is_direct || scaled.scale != 1) {
        device_ops::CopyScaled(out, result, scaled.scale);
      }
    };
    return Launch(sum, label, {args.in, args.out}, finish);
  }

 private:
  // Keeps `tensors` as long as the operation runs. `finish` comes after it.
  StartedWork Launch(const CollectiveArgs& args, absl::string_view label,
                     std::vector<at::Tensor> tensors, Group::Finish finish) {
    const at::Tensor& counted = args.counted();
    Call call = CallOf(args.collective, label, counted);
    if (counted.device() != options_.device) {
      return absl::UnimplementedError(absl::StrCat(
          comm::ToString(call), " on ", Place(), ": c10d's ", name_,
          " was created for tensors on ", options_.device.str(), ", not ",
          counted.device().str()));
    }
    const bool is_empty = counted.numel() == 0;
    const auto start = [&](c10d::Backend& backend) {
      return is_empty ? WorkPtr() : StartIn(backend, args);
    };
    FSDP_ASSIGN_OR_RETURN(
        auto operation,
        group_->Launch(std::move(call),
                       static_cast<int64_t>(args.whole().nbytes()), start,
                       is_empty ? nullptr : std::move(finish)));
    return std::make_unique<StreamWork<Group>>(group_, std::move(operation),
                                               std::move(tensors));
  }

  WorkPtr StartIn(c10d::Backend& backend, const CollectiveArgs& args) const {
    const std::chrono::milliseconds timeout =
        absl::ToChronoMilliseconds(options_.timeout + kGrace);
    // c10d takes no const tensors.
    at::Tensor out = args.out;
    at::Tensor in = args.in;
    switch (args.collective) {
      case Collective::kAllGather: {
        c10d::AllgatherOptions options;
        options.timeout = timeout;
        out = Bytes(out);
        in = Bytes(in);
        return backend._allgather_base(out, in, options);
      }
      case Collective::kReduceScatter: {
        c10d::ReduceScatterOptions options;
        options.reduceOp = ToC10d(args.op);
        options.timeout = timeout;
        return backend._reduce_scatter_base(out, in, options);
      }
      case Collective::kAllToAll: {
        c10d::AllToAllOptions options;
        options.timeout = timeout;
        out = Bytes(out);
        in = Bytes(in);
        std::vector<int64_t> equal_parts;
        return backend.alltoall_base(out, in, equal_parts, equal_parts,
                                     options);
      }
      case Collective::kAllReduce: {
        c10d::AllreduceOptions options;
        options.reduceOp = ToC10d(args.op);
        options.timeout = timeout;
        std::vector<at::Tensor> tensors = {out};
        return backend.allreduce(tensors, options);
      }
      case Collective::kBroadcast: {
        c10d::BroadcastOptions options;
        options.rootRank = args.root;
        options.timeout = timeout;
        std::vector<at::Tensor> tensors = {Bytes(out)};
        return backend.broadcast(tensors, options);
      }
      case Collective::kSplit:
        break;
    }
    return nullptr;
  }

  absl::StatusOr<std::vector<SplitRequest>> Requests(int color, int key) {
    constexpr absl::string_view kWhat = "split the group";
    const int64_t mine = int64_t{2} * rank();
    at::Tensor all;
    FSDP_RETURN_IF_ERROR(TorchToStatus(kWhat, [&] {
      all = at::empty(
          {int64_t{2} * world_size()},
          at::TensorOptions().dtype(at::kLong).device(options_.device));
      all[mine].fill_(color);
      all[mine + 1].fill_(key);
    }));
    FSDP_ASSIGN_OR_RETURN(auto work,
                          AllGather(all, all.narrow(0, mine, 2), "the group"));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + options_.timeout));
    std::vector<SplitRequest> requests;
    FSDP_RETURN_IF_ERROR(TorchToStatus(kWhat, [&] {
      const at::Tensor here = all.cpu();
      const auto* data =
          static_cast<const SplitRequest*>(here.const_data_ptr());
      requests.assign(data, data + world_size());
    }));
    return requests;
  }

  const std::string name_;
  const std::shared_ptr<Group> group_;
  const StorePtr store_;
  const C10dBackendOptions options_;
  int num_splits_ = 0;
};

CreatedCommunicator Create(C10dConnection connection, const StorePtr& store,
                           RankNames names, C10dBackendOptions options);

CreatedCommunicator C10dBackendCommunicator::Split(int color, int key) {
  FSDP_RETURN_IF_ERROR(CheckColor(color));
  const std::string what = absl::StrCat("split on ", Place());
  if (!options_.connect) {
    return absl::UnimplementedError(absl::StrCat(
        what, ": c10d's ", name_,
        " was given without C10dBackendOptions::connect, which makes backends "
        "of sub-groups"));
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<SplitRequest> requests,
                        Requests(color, key));
  C10dMeeting meeting;
  meeting.ranks = MembersByColor(requests)[color];
  meeting.rank = RankAmong(meeting.ranks, rank());
  const StorePtr store = c10::make_intrusive<c10d::PrefixStore>(
      absl::StrCat("split", num_splits_++, "/color", color), store_);
  meeting.store = c10::make_intrusive<c10d::PrefixStore>("connect", store);
  meeting.names = names().Part(meeting.ranks);
  auto connection = options_.connect(meeting);
  if (!connection.ok()) return Annotate(connection.status(), what);
  const c10d::Backend* const backend = connection->backend.get();
  if (backend == nullptr || backend->getSize() != meeting.names.size() ||
      backend->getRank() != meeting.rank) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": C10dBackendOptions::connect has not returned a backend of ",
        meeting.names.Place(meeting.rank)));
  }
  return Create(*std::move(connection), store, meeting.names, options_);
}

// Closes the connections of Gloo, whose abort() does nothing, by waiting for a
// message that does not come: Gloo closes them all at the time-out.
void CloseGloo(c10d::Backend& gloo) {
  constexpr int kTag = 0x46534450;  // used for nothing else
  std::vector<at::Tensor> never = {
      at::empty({1}, at::TensorOptions().dtype(at::kByte))};
  const int peer = (gloo.getRank() + 1) % gloo.getSize();
  gloo.recv(never, peer, kTag)->wait(std::chrono::milliseconds(1));
}

std::string NameOf(const c10d::Backend& backend) {
  std::string name = "backend";  // for a backend that does not say
  (void)TorchToStatus("ask for the name of a backend",
                      [&] { name = backend.getBackendName(); });
  return name;
}

// Requires a backend and a store that are not null.
CreatedCommunicator Create(C10dConnection connection, const StorePtr& store,
                           RankNames names, C10dBackendOptions options) {
  const auto backend = connection.backend;
  std::string name = NameOf(*backend);
  const std::string what =
      absl::StrCat("create a group of c10d's ", name, " on ",
                   names.Place(backend->getRank()));
  const bool is_gloo = name == "gloo";
  if (!connection.close) {
    connection.close = [raw = backend.get(), is_gloo] {
      raw->abort();
      if (is_gloo && raw->getSize() > 1) CloseGloo(*raw);
    };
  }
  // The works of these wait until they are done.
  const bool host_waits = options.device.is_cpu() || is_gloo || name == "mpi";
  FSDP_ASSIGN_OR_RETURN(
      auto group, Annotate(Group::Create(std::move(connection), host_waits,
                                         store, std::move(names), options),
                           what));
  return std::make_unique<C10dBackendCommunicator>(
      std::move(name), std::move(group), store, std::move(options));
}

}  // namespace

CreatedCommunicator CreateC10dBackendCommunicator(C10dConnection connection,
                                                  const StorePtr& store,
                                                  C10dBackendOptions options) {
  if (connection.backend == nullptr || store == nullptr) {
    return absl::InvalidArgumentError(
        "create a group of a c10d backend: there must be a backend and a "
        "store");
  }
  if (!options.device.is_cpu() && !options.device.has_index()) {
    return absl::InvalidArgumentError(
        absl::StrCat("create a group of a c10d backend: the device ",
                     options.device.str(), " has no index; say which one"));
  }
  FSDP_ASSIGN_OR_RETURN(
      RankNames names,
      RankNames::Of(connection.backend->getSize(), options.world_ranks));
  return Create(std::move(connection), store, std::move(names),
                std::move(options));
}

}  // namespace fsdp::comm
