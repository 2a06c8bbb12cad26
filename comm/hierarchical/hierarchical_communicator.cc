#include "comm/hierarchical/hierarchical_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_queue.h"
#include "comm/hierarchical/host_layout.h"

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

// Runs operations one after the other on a thread of its own, so that all ranks
// make their calls to the parts in one order, and a call never blocks. The
// first failure of a part ends all parts, here and on the peers, which the
// network tells. Thread-safe.
class Group {
 public:
  using Run = std::function<absl::Status(Group&)>;
  using Operation = OperationQueue::Operation;

  // ResourceExhausted: no thread can be started. The peers are told.
  static absl::StatusOr<std::shared_ptr<Group>> Create(
      HierarchicalParts parts) {
    std::shared_ptr<Group> group(new Group(std::move(parts)));
    absl::Status started = group->queue_.Start("for collectives between hosts");
    if (started.ok()) started = group->Listen();
    if (started.ok()) return group;
    group->Abort(started);
    return started;
  }

  ~Group() { Stop(); }

  int rank() const { return rank_; }
  int world_size() const { return names_.size(); }
  const RankNames& names() const { return names_; }
  const HostLayout& layout() const { return layout_; }

  // Queues an operation. Fails at once when the group has failed.
  absl::StatusOr<std::shared_ptr<Operation>> Post(const Call& call, Run run) {
    int64_t sequence = 0;
    {
      absl::MutexLock lock(&mutex_);
      sequence = next_sequence_++;
    }
    return PostUncounted(Name(call, sequence), std::move(run));
  }

  // Does the same for an operation that is not counted as a call.
  absl::StatusOr<std::shared_ptr<Operation>> PostUncounted(
      const std::string& name, Run run) {
    auto operation = queue_.Post(name, [this, name, run = std::move(run)] {
      return Execute(name, run);
    });
    if (operation == nullptr) return ErrorOf(name);
    return operation;
  }

  // Does what Work::Wait() does.
  absl::Status Wait(const Operation& operation, absl::Time deadline) {
    const auto give_up = [&] { GiveUp(operation); };
    if (queue_.Wait(operation, deadline, give_up, kLetGo)) {
      return absl::OkStatus();
    }
    return ErrorOf(operation.name);
  }

  // Fails the group, here and on the peers.
  void Abort(const absl::Status& reason) {
    const absl::Status aborted = absl::AbortedError(
        absl::StrCat(names_.Name(rank_), " aborted: ", reason.message()));
    Fail({aborted, aborted});
  }

  // Fails operations that are not done, ends the thread and destroys the parts.
  // Only the first call counts.
  void Stop() {
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
    if (listener_.joinable()) listener_.join();
    parts_ = HierarchicalParts();
    scratch_.reset();
  }

  // The rest of the public methods is for operations while they run.
  Communicator& host() { return *parts_.host; }
  Communicator& rail() { return *parts_.rail; }
  CreatedCommunicator SplitNetwork(int color, int key) {
    FSDP_RETURN_IF_ERROR(EndListening());
    FSDP_ASSIGN_OR_RETURN(auto part, parts_.network->Split(color, key));
    FSDP_RETURN_IF_ERROR(Listen());
    return part;
  }

  // Returns memory between the steps of an operation, of the dtype of `like`.
  // It comes from the host group and is kept; it grows as needed.
  absl::StatusOr<at::Tensor> Scratch(const at::Tensor& like, int64_t numel) {
    const int64_t bytes = numel * static_cast<int64_t>(like.element_size());
    if (!scratch_.defined() || scratch_.numel() < bytes) {
      scratch_.reset();
      FSDP_ASSIGN_OR_RETURN(scratch_, host().AllocateSymmetric(bytes));
    }
    return scratch_.narrow(0, 0, bytes).view(like.scalar_type());
  }

  // Waits for all calls to parts, in order, and returns the first error. An
  // error fails the group at once, so that none of the calls goes on.
  absl::Status Finish(std::vector<StartedWork> works) {
    absl::Status first;
    for (StartedWork& started : works) {
      const absl::Status status = FinishOne(std::move(started));
      if (first.ok()) first = status;
    }
    return first;
  }

  absl::Status FinishOne(StartedWork started) {
    absl::Status status = started.status();
    if (status.ok()) {
      const std::shared_ptr<Work> work = *std::move(started);
      {
        absl::MutexLock lock(&mutex_);
        stage_ = work;
      }
      // Waits until Fail() aborts the part; see GiveUp().
      status = work->Wait(absl::InfiniteFuture());
      absl::MutexLock lock(&mutex_);
      stage_ = nullptr;
    }
    if (!status.ok()) FailWith(status);
    return status;
  }

 private:
  explicit Group(HierarchicalParts parts)
      : parts_(std::move(parts)),
        layout_{parts_.rail->world_size(), parts_.host->world_size()},
        rank_(parts_.network->rank()),
        names_(parts_.network->names()) {}

  StartedWork Watch() {
    return parts_.network->Broadcast(at::zeros({1}), /*root=*/0,
                                     "the failure watch");
  }

  // Lets this rank hear that another one has aborted the network, whatever this
  // rank is doing: a thread waits for a broadcast that rank 0 does not send
  // before EndListening(), and that fails when a rank aborts the network. Rank
  // 0 is not told. Meanwhile the network may only be aborted.
  // ResourceExhausted: no thread can be started.
  absl::Status Listen() {
    if (rank_ == 0) return absl::OkStatus();
    const auto listen = [this, work = std::make_shared<StartedWork>(Watch())] {
      heard_ =
          work->ok() ? (**work)->Wait(absl::InfiniteFuture()) : work->status();
      const bool is_failure =
          !heard_.ok() && (DecodeFailure(heard_.message()).has_value() ||
                           !absl::StrContains(heard_.message(), kHasLeft));
      if (is_failure) FailWith(heard_);
    };
    FSDP_ASSIGN_OR_RETURN(listener_, StartThread("to watch the group", listen));
    return absl::OkStatus();
  }

  // Collective. Returns the broadcast's error.
  absl::Status EndListening() {
    if (rank_ == 0) {
      FSDP_ASSIGN_OR_RETURN(auto work, Watch());
      return work->Wait(absl::InfiniteFuture());
    }
    if (listener_.joinable()) listener_.join();
    return heard_;
  }

  // The error of this rank's operations, and the one for the other ranks.
  struct Failure {
    absl::Status status;
    absl::Status status_of_others;
  };

  absl::Status Execute(absl::string_view name, const Run& run) {
    const c10::NoGradGuard no_grad;
    absl::Status status = TorchToStatus(name, [&] { return run(*this); });
    // Does nothing if a part has failed, which has been told already.
    if (!status.ok()) {
      Fail({status, absl::AbortedError(absl::StrCat(
                        names_.Name(rank_), " failed: ", status.message()))});
    }
    return status;
  }

  // Fails the group because `operation` is late. A second wait, whose deadline
  // has passed, asks the call for which the operation waits: it knows whom it
  // lacks, and its part tells the others.
  void GiveUp(const Operation& operation) {
    while (true) {
      std::shared_ptr<Work> stage;
      {
        absl::MutexLock lock(&mutex_);
        if (failure_) return;
        stage = stage_;
      }
      // The stage is read first: an operation not done now was not done then.
      if (queue_.IsDone(operation)) return;
      if (stage == nullptr) {
        const absl::string_view text = "not done at the deadline";
        return Fail({absl::DeadlineExceededError(text),
                     absl::AbortedError(absl::StrCat(names_.Name(rank_),
                                                     " gave up: ", text))});
      }
      const absl::Status status = stage->Wait(absl::Now());
      if (!status.ok()) return FailWith(status);
      // The call is done after all; the operation goes on to the next one.
      const auto has_moved = [&] {
        mutex_.AssertHeld();
        return failure_ || stage_ != stage;
      };
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_moved));
    }
  }

  void Fail(Failure failure) {
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

  // Passes on the error of a part, whose text begins with the operation and
  // this rank's place in the part.
  void FailWith(const absl::Status& status) {
    if (const auto told = DecodeFailure(status.message()); told.has_value()) {
      return Fail({*told, *told});
    }
    const absl::string_view text = status.message();
    switch (status.code()) {
      case absl::StatusCode::kAborted:
      case absl::StatusCode::kInvalidArgument:
      case absl::StatusCode::kUnavailable:
        return Fail({status, status});
      case absl::StatusCode::kDeadlineExceeded:
        return Fail({status, absl::AbortedError(absl::StrCat(
                                 names_.Name(rank_), " gave up waiting for ",
                                 queue_.NameOfNext(), ": ", text))});
      default:
        return Fail({status, absl::AbortedError(absl::StrCat(
                                 names_.Name(rank_), " failed: ", text))});
    }
  }

  // Returns the error of the operation `name` of a group that has failed.
  absl::Status ErrorOf(absl::string_view name) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return Annotate(failure_->status,
                    absl::StrCat(name, " on ", names_.Place(rank_)));
  }

  HierarchicalParts parts_;  // not changed before Stop() ends
  at::Tensor scratch_;       // bytes
  const HostLayout layout_;
  const int rank_;
  const RankNames names_;
  std::thread listener_;  // changed by operations, and by Stop() behind them
  absl::Status heard_;    // by listener_

  absl::Mutex mutex_;
  int64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  // The call to a part that the running operation waits for.
  std::shared_ptr<Work> stage_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);  // the first
  // The last, so that its thread ends first.
  OperationQueue queue_;
};

// Up to this many bytes, every rail moves all of an all-reduce or a broadcast:
// saving a step matters more than saving bytes.
constexpr int64_t kSmall = 32 << 10;
constexpr int64_t kSliceElements = 64;  // edges of slices are multiples of it

bool IsSmall(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes()) <= kSmall;
}

at::Tensor PartOf(const at::Tensor& tensor, int index, int count) {
  const int64_t size = tensor.numel() / count;
  return tensor.narrow(0, index * size, size);
}

// A collective of a hierarchical group, made of those of its parts, which an
// operation of the group makes. Its methods block, make exactly one call to the
// rail each, and return the errors of Group::Finish().
class HierarchicalCollective {
 public:
  // Both outlive it.
  HierarchicalCollective(Group& group, absl::string_view label)
      : group_(group),
        host_(group.host()),
        rail_(group.rail()),
        layout_(group.layout()),
        label_(label) {}

  absl::Status Run(const CollectiveArgs& args) {
    switch (args.collective) {
      case Collective::kAllGather:
        return AllGather(args.out, args.in);
      case Collective::kReduceScatter:
        return ReduceScatter(args.out, args.in, args.op);
      case Collective::kAllToAll:
        return AllToAll(args.out, args.in);
      case Collective::kAllReduce:
        return AllReduce(args.out, args.op);
      case Collective::kBroadcast:
        return Broadcast(args.out, args.root);
      case Collective::kSplit:
        break;
    }
    return absl::InternalError("a split moves no tensors");
  }

  absl::Status AllGather(const at::Tensor& out, const at::Tensor& in) {
    const int hosts = layout_.num_hosts;
    const int own_host = layout_.host(group_.rank());
    FSDP_ASSIGN_OR_RETURN(const at::Tensor sent,
                          group_.Scratch(in, in.numel() * hosts));
    auto between_hosts = rail_.AllGather(sent, in, label_);
    const auto gather = [&](int host, const at::Tensor& from) {
      return host_.AllGather(PartOf(out, host, hosts), from, label_);
    };
    // Meanwhile the parts of this host are gathered.
    std::vector<StartedWork> works;
    works.push_back(gather(own_host, in));
    works.push_back(std::move(between_hosts));
    FSDP_RETURN_IF_ERROR(group_.Finish(std::move(works)));
    works.clear();
    for (int host = 0; host < hosts; ++host) {
      if (host == own_host) continue;
      works.push_back(gather(host, PartOf(sent, host, hosts)));
    }
    return group_.Finish(std::move(works));
  }

 private:
  absl::Status ReduceScatter(const at::Tensor& out, const at::Tensor& in,
                             ReduceOp op) {
    const int hosts = layout_.num_hosts;
    FSDP_ASSIGN_OR_RETURN(const at::Tensor sums,
                          group_.Scratch(out, out.numel() * hosts));
    std::vector<StartedWork> works;
    works.reserve(hosts);
    for (int host = 0; host < hosts; ++host) {
      works.push_back(host_.ReduceScatter(PartOf(sums, host, hosts),
                                          PartOf(in, host, hosts), op, label_));
    }
    FSDP_RETURN_IF_ERROR(group_.Finish(std::move(works)));
    return group_.FinishOne(rail_.ReduceScatter(out, sums, op, label_));
  }

  // Exchanges inside the host first: each place gets what its rail takes to the
  // other hosts, in the order in which they put it into `out`.
  absl::Status AllToAll(const at::Tensor& out, const at::Tensor& in) {
    const int hosts = layout_.num_hosts;
    FSDP_ASSIGN_OR_RETURN(const at::Tensor sent,
                          group_.Scratch(in, in.numel()));
    std::vector<StartedWork> works;
    works.reserve(hosts);
    for (int host = 0; host < hosts; ++host) {
      works.push_back(host_.AllToAll(PartOf(sent, host, hosts),
                                     PartOf(in, host, hosts), label_));
    }
    FSDP_RETURN_IF_ERROR(group_.Finish(std::move(works)));
    return group_.FinishOne(rail_.AllToAll(out, sent, label_));
  }

  absl::Status AllReduce(const at::Tensor& tensor, ReduceOp op) {
    const int places = layout_.ranks_per_host;
    const auto reduce_between_hosts = [&](const at::Tensor& part) {
      return group_.FinishOne(rail_.AllReduce(part, op, label_));
    };
    if (!IsSmall(tensor) && tensor.numel() % places == 0) {
      const at::Tensor part = PartOf(tensor, place(), places);
      FSDP_RETURN_IF_ERROR(
          group_.FinishOne(host_.ReduceScatter(part, tensor, op, label_)));
      FSDP_RETURN_IF_ERROR(reduce_between_hosts(part));
      return group_.FinishOne(host_.AllGather(tensor, part, label_));
    }
    FSDP_RETURN_IF_ERROR(group_.FinishOne(host_.AllReduce(tensor, op, label_)));
    FSDP_RETURN_IF_ERROR(reduce_between_hosts(Slice(tensor, place())));
    return ExchangeSlices(tensor);
  }

  absl::Status Broadcast(const at::Tensor& tensor, int root) {
    const bool is_from_here = layout_.host(group_.rank()) == layout_.host(root);
    if (is_from_here) {
      FSDP_RETURN_IF_ERROR(group_.FinishOne(
          host_.Broadcast(tensor, layout_.place(root), label_)));
    }
    // The label tells hosts apart that name different ranks of one host.
    FSDP_RETURN_IF_ERROR(group_.FinishOne(
        rail_.Broadcast(Slice(tensor, place()), layout_.host(root),
                        absl::StrCat(label_, ", root ", root))));
    return is_from_here ? absl::OkStatus() : ExchangeSlices(tensor);
  }

  int place() const { return layout_.place(group_.rank()); }

  // Returns the part of a tensor that the rail of `place` moves.
  at::Tensor Slice(const at::Tensor& tensor, int place) const {
    if (IsSmall(tensor)) return tensor;
    const int64_t blocks =
        (tensor.numel() + kSliceElements - 1) / kSliceElements;
    const auto edge = [&](int p) {
      return std::min(tensor.numel(),
                      blocks * p / layout_.ranks_per_host * kSliceElements);
    };
    return tensor.narrow(0, edge(place), edge(place + 1) - edge(place));
  }

  // Lets every place of the host send its slice to the other places.
  absl::Status ExchangeSlices(const at::Tensor& tensor) {
    if (IsSmall(tensor)) return absl::OkStatus();
    std::vector<StartedWork> works;
    for (int place = 0; place < layout_.ranks_per_host; ++place) {
      works.push_back(host_.Broadcast(Slice(tensor, place), place, label_));
    }
    return group_.Finish(std::move(works));
  }

  Group& group_;
  Communicator& host_;
  Communicator& rail_;
  const HostLayout& layout_;
  const absl::string_view label_;
};

// Returns "gloo" for "gloo, rank 1 of 4".
std::string WithoutRank(const Communicator& part) {
  const std::string name = part.ToString();
  return name.substr(0, name.rfind(", rank "));
}

class HierarchicalCommunicator final : public Communicator {
 public:
  HierarchicalCommunicator(std::string name, absl::Duration timeout,
                           bool has_all_to_all, std::shared_ptr<Group> group)
      : timeout_(timeout),
        has_all_to_all_(has_all_to_all),
        name_(std::move(name)),
        group_(std::move(group)) {}
  ~HierarchicalCommunicator() override {
    if (unwinds()) group_->Abort(EndedByException());
    group_->Stop();
  }

  int rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  const RankNames& names() const override { return group_->names(); }
  absl::Duration default_timeout() const override { return timeout_; }
  std::string ToString() const override { return name_; }

  bool HasAllToAll() const override { return has_all_to_all_; }

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    const auto memory = std::make_shared<absl::StatusOr<at::Tensor>>();
    FSDP_ASSIGN_OR_RETURN(
        auto operation,
        group_->PostUncounted(absl::StrCat("allocation of ", bytes, " bytes"),
                              [memory, bytes](Group& group) {
                                *memory = group.host().AllocateSymmetric(bytes);
                                return absl::OkStatus();
                              }));
    FSDP_RETURN_IF_ERROR(group_->Wait(*operation, absl::Now() + timeout_));
    return std::move(*memory);
  }

  CreatedCommunicator Split(int color, int key) override;
  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    const Call call{args.collective, std::string(label), "", 0, ""};
    if (!args.out.device().is_cpu()) {
      return absl::UnimplementedError(
          absl::StrCat(comm::ToString(call), " on ", Place(),
                       ": hierarchical groups take CPU tensors, not ",
                       args.out.device().str()));
    }
    const auto run = [args, label = std::string(label)](Group& group) {
      return HierarchicalCollective(group, label).Run(args);
    };
    FSDP_ASSIGN_OR_RETURN(auto operation, group_->Post(call, run));
    return std::make_unique<GroupWork<Group>>(group_, std::move(operation),
                                              timeout_);
  }

 private:
  const absl::Duration timeout_;
  const bool has_all_to_all_;
  const std::string name_;
  const std::shared_ptr<Group> group_;
};

absl::StatusOr<std::vector<SplitRequest>> ExchangeRequests(
    Group& group, const SplitRequest& own) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(SplitRequest));
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte);
  const at::Tensor in = at::empty({kBytes}, bytes);
  const at::Tensor out = at::empty({kBytes * group.world_size()}, bytes);
  std::memcpy(in.mutable_data_ptr(), &own, sizeof(own));
  FSDP_RETURN_IF_ERROR(
      HierarchicalCollective(group, "the group, which is split")
          .AllGather(out, in));
  std::vector<SplitRequest> requests(group.world_size());
  std::memcpy(requests.data(), out.const_data_ptr(), out.nbytes());
  return requests;
}

CreatedCommunicator SplitParts(Group& group, const SplitPlan& plan, int color,
                               int key) {
  switch (plan.kind) {
    case SplitPlan::Kind::kInsideHosts:
      return group.host().Split(color, key);
    case SplitPlan::Kind::kBetweenHosts:
      return group.rail().Split(color, key);
    case SplitPlan::Kind::kNetwork:
      return group.SplitNetwork(color, key);
    case SplitPlan::Kind::kHierarchical:
      break;
  }
  HierarchicalParts parts;
  FSDP_ASSIGN_OR_RETURN(parts.host, group.host().Split(color, plan.place));
  FSDP_ASSIGN_OR_RETURN(parts.rail, group.rail().Split(color, plan.host));
  FSDP_ASSIGN_OR_RETURN(parts.network, group.SplitNetwork(color, key));
  return CreateHierarchicalCommunicator(std::move(parts));
}

CreatedCommunicator HierarchicalCommunicator::Split(int color, int key) {
  FSDP_RETURN_IF_ERROR(CheckColor(color));
  const Call call{Collective::kSplit, "the group", "", 0, ""};
  const auto part = std::make_shared<std::unique_ptr<Communicator>>();
  FSDP_ASSIGN_OR_RETURN(
      auto operation,
      group_->Post(call, [part, color, key](Group& group) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const std::vector<SplitRequest> requests,
                              ExchangeRequests(group, {color, key}));
        const SplitPlan plan =
            PlanSplit(requests, group.layout(), group.rank());
        FSDP_ASSIGN_OR_RETURN(*part, SplitParts(group, plan, color, key));
        return absl::OkStatus();
      }));
  FSDP_RETURN_IF_ERROR(group_->Wait(*operation, absl::Now() + timeout_));
  return std::move(*part);
}

}  // namespace

CreatedCommunicator CreateHierarchicalCommunicator(HierarchicalParts parts) {
  const Communicator& host = *parts.host;
  const Communicator& rail = *parts.rail;
  const Communicator& network = *parts.network;
  FSDP_CHECK(network.world_size() == rail.world_size() * host.world_size() &&
             network.rank() == rail.rank() * host.world_size() + host.rank());
  std::string name = absl::StrCat(
      "hierarchical (", WithoutRank(host), " inside ", rail.world_size(),
      " hosts, ", WithoutRank(rail), " between them), ", network.Place());
  const absl::Duration timeout = network.default_timeout();
  const bool has_all_to_all = host.HasAllToAll() && rail.HasAllToAll();
  FSDP_ASSIGN_OR_RETURN(auto group, Group::Create(std::move(parts)));
  return std::make_unique<HierarchicalCommunicator>(
      std::move(name), timeout, has_all_to_all, std::move(group));
}

}  // namespace fsdp::comm
