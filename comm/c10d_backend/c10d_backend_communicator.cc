#include "comm/c10d_backend/c10d_backend_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/c10d_backend/c10d_backend_group.h"
#include "comm/group/operation_watchdog.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using C10dReduceOp = c10d::ReduceOp;

// The time that c10d has beyond the group's deadline: an operation that c10d
// ends first ends without a reason.
constexpr absl::Duration kGrace = absl::Minutes(1);

C10dReduceOp ToC10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return C10dReduceOp::MIN;
    case ReduceOp::kMax:
      return C10dReduceOp::MAX;
    case ReduceOp::kSum:
      break;
  }
  return C10dReduceOp::SUM;
}

// Returns a view as bytes: data that only moves needs no dtype, and some
// backends lack a few.
at::Tensor Bytes(const at::Tensor& tensor) { return tensor.view(at::kByte); }

class C10dBackendCommunicator final : public Communicator {
 public:
  C10dBackendCommunicator(std::string name,
                          std::shared_ptr<C10dBackendGroup> group,
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
        return;
      }
      if (!is_direct) out.copy_(result);
      if (scaled.scale != 1) out.mul_(scaled.scale);
    };
    return Launch(sum, label, {args.in, args.out}, finish);
  }

 private:
  struct Member {
    int64_t color;
    int64_t key;
  };

  // Keeps `tensors` as long as the operation runs. `finish` comes after it.
  StartedWork Launch(const CollectiveArgs& args, absl::string_view label,
                     std::vector<at::Tensor> tensors,
                     C10dBackendGroup::Finish finish) {
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
      return is_empty ? C10dBackendGroup::WorkPtr() : StartIn(backend, args);
    };
    FSDP_ASSIGN_OR_RETURN(
        auto operation,
        group_->Launch(std::move(call),
                       static_cast<int64_t>(args.whole().nbytes()), start,
                       is_empty ? nullptr : std::move(finish)));
    return std::make_unique<StreamWork<C10dBackendGroup>>(
        group_, std::move(operation), std::move(tensors));
  }

  C10dBackendGroup::WorkPtr StartIn(c10d::Backend& backend,
                                    const CollectiveArgs& args) const {
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

  absl::StatusOr<std::vector<Member>> Members(int color, int key) {
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
    std::vector<Member> members;
    FSDP_RETURN_IF_ERROR(TorchToStatus(kWhat, [&] {
      const at::Tensor here = all.cpu();
      const auto* data = static_cast<const Member*>(here.const_data_ptr());
      members.assign(data, data + world_size());
    }));
    return members;
  }

  const std::string name_;
  const std::shared_ptr<C10dBackendGroup> group_;
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
  FSDP_ASSIGN_OR_RETURN(const std::vector<Member> members, Members(color, key));
  C10dMeeting meeting;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (members[peer].color == color) meeting.ranks.push_back(peer);
  }
  std::stable_sort(
      meeting.ranks.begin(), meeting.ranks.end(),
      [&](int a, int b) { return members[a].key < members[b].key; });
  meeting.rank = static_cast<int>(
      std::find(meeting.ranks.begin(), meeting.ranks.end(), rank()) -
      meeting.ranks.begin());
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
  const std::string place = names.Place(backend->getRank());
  C10dBackendGroup::Options group_options;
  group_options.watched = {backend->getRank(), std::move(names),
                           options.timeout, options.diagnosis_timeout};
  group_options.device = options.device;
  // The works of these wait until they are done.
  group_options.host_waits =
      options.device.is_cpu() || name == "gloo" || name == "mpi";
  group_options.is_capturing = options.is_capturing;
  group_options.leave = std::move(connection.leave);
  group_options.close = std::move(connection.close);
  if (!group_options.close) {
    group_options.close = [raw = backend.get(), is_gloo = name == "gloo"] {
      raw->abort();
      if (is_gloo && raw->getSize() > 1) CloseGloo(*raw);
    };
  }
  auto group =
      C10dBackendGroup::Create(backend, store, std::move(group_options));
  if (!group.ok()) {
    return Annotate(group.status(), absl::StrCat("create a group of c10d's ",
                                                 name, " on ", place));
  }
  return std::make_unique<C10dBackendCommunicator>(
      std::move(name), *std::move(group), store, std::move(options));
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
