#include "comm/nccl/nccl_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/connect_together.h"
#include "comm/group/operation_watchdog.h"
#include "comm/nccl/nccl_group.h"
#include "comm/nccl/nccl_handle.h"
#include "comm/split_members.h"
#include "device_ops/pack.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

void Nothing() {}

// Returns GPU `index`, by default the calling thread's current one.
// InvalidArgument: there is no GPU of this index.
absl::StatusOr<c10::Device> FindGpu(std::optional<int> index) {
  int num_devices = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDeviceCount(&num_devices), "look for a GPU"));
  int gpu = index.value_or(0);
  if (!index.has_value()) {
    FSDP_RETURN_IF_ERROR(
        CudaToStatus(cudaGetDevice(&gpu), "ask for the current GPU"));
  }
  if (gpu < 0 || gpu >= num_devices) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no GPU ", gpu, ": this process sees ",
                     num_devices, "; see CUDA_VISIBLE_DEVICES"));
  }
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu));
}

// Makes GPU `index`, by default `local_rank` modulo the number of GPUs, the
// calling thread's current one, and returns its index.
absl::StatusOr<int> TakeGpu(std::optional<int> index, int local_rank) {
  int num_gpus = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDeviceCount(&num_gpus), "look for a GPU"));
  if (num_gpus == 0) {
    return absl::FailedPreconditionError(
        "this process sees no GPU; see CUDA_VISIBLE_DEVICES");
  }
  const int gpu = index.value_or(local_rank % num_gpus);
  FSDP_RETURN_IF_ERROR(CudaToStatus(
      cudaSetDevice(gpu), absl::StrCat("make GPU ", gpu, " the current one")));
  return gpu;
}

size_t Count(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel());
}

// Closes the NCCL group even if a call in it has failed.
ncclResult_t AllToAllBySends(const at::Tensor& in, const at::Tensor& out,
                             int ranks, ncclComm_t comm, cudaStream_t stream) {
  const ncclDataType_t dtype = NcclDtype(in.scalar_type());
  const size_t count = Count(in) / ranks;
  const size_t bytes = in.nbytes() / ranks;
  const char* from = static_cast<const char*>(in.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return result;
  for (int peer = 0; peer < ranks && result == ncclSuccess; ++peer) {
    result = ncclSend(from + peer * bytes, count, dtype, peer, comm, stream);
    if (result != ncclSuccess) break;
    result = ncclRecv(to + peer * bytes, count, dtype, peer, comm, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclGroup> group, StorePtr store,
                   const NcclOptions& options)
      : group_(std::move(group)),
        store_(std::move(store)),
        options_(options),
        registers_windows_(options.windows != NcclWindows::kNone &&
                           HasNcclWindows()) {}
  ~NcclCommunicator() override {
    if (unwinds()) group_->Abort(EndedByException());
    group_->Leave();
  }

  int rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  const RankNames& names() const override { return group_->names(); }
  absl::Duration default_timeout() const override { return options_.timeout; }
  std::string ToString() const override {
    return absl::StrCat("nccl on ", group_->device().str(), ", ", Place());
  }

  // NVLink switches and symmetric kernels only do plain sums.
  bool PrefersScaledInputs() const override { return true; }
  bool CanBeCaptured() const override { return true; }
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    if (bytes > 0 && world_size() > 1 && registers_windows_) {
      FSDP_ASSIGN_OR_RETURN(
          const auto window,
          AllocateWindow(bytes,
                         absl::StrCat("allocate ", bytes, " symmetric bytes")));
      if (window != nullptr) return NcclMemory::AsTensor(window);
    }
    return AllocatePlain(bytes, group_->device());
  }

  CreatedCommunicator Split(int color, int key) override;
  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    return Launch(args, label, {args.out, args.in}, Nothing);
  }

  // Scales a plain sum: NCCL's mean and its premultiplied sums are none.
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
    const auto finish = [&] {
      const c10::NoGradGuard no_grad;
      if (is_direct && scaled.scale == 1) return;
      device_ops::CopyScaled(args.out, sum.out, scaled.scale,
                             scaled.accumulate);
    };
    return Launch(sum, label, {args.in, args.out}, finish);
  }

 private:
  // Keeps `tensors` as long as the operation runs. `finish` comes after it.
  StartedWork Launch(const CollectiveArgs& args, absl::string_view label,
                     std::vector<at::Tensor> tensors,
                     NcclGroup::Finish finish) {
    const at::Tensor& counted = args.counted();
    Call call = CallOf(args.collective, label, counted);
    if (counted.device() != group_->device()) {
      return absl::UnimplementedError(absl::StrCat(
          comm::ToString(call), " on ", Place(), ": nccl takes tensors on ",
          group_->device().str(), ", not ", counted.device().str()));
    }
    const auto bytes = static_cast<int64_t>(args.whole().nbytes());
    const auto enqueue = [&](ncclComm_t comm, cudaStream_t stream) {
      return counted.numel() == 0 ? ncclSuccess : Enqueue(args, comm, stream);
    };
    FSDP_ASSIGN_OR_RETURN(auto operation, group_->Launch(std::move(call), bytes,
                                                         enqueue, finish));
    return std::make_unique<StreamWork<NcclGroup>>(group_, std::move(operation),
                                                   std::move(tensors));
  }

  ncclResult_t Enqueue(const CollectiveArgs& args, ncclComm_t comm,
                       cudaStream_t stream) const {
    const ncclDataType_t dtype = NcclDtype(args.counted().scalar_type());
    const size_t count = Count(args.counted());
    void* to = args.out.mutable_data_ptr();
    const void* from = args.in.defined() ? args.in.const_data_ptr() : to;
    switch (args.collective) {
      case Collective::kAllGather:
        return ncclAllGather(from, to, count, dtype, comm, stream);
      case Collective::kReduceScatter:
        return ncclReduceScatter(from, to, count, dtype, NcclReduction(args.op),
                                 comm, stream);
      case Collective::kAllToAll:
        return AllToAllBySends(args.in, args.out, world_size(), comm, stream);
      case Collective::kAllReduce:
        return ncclAllReduce(from, to, count, dtype, NcclReduction(args.op),
                             comm, stream);
      case Collective::kBroadcast:
        return ncclBroadcast(from, to, count, dtype, args.root, comm, stream);
      case Collective::kSplit:
        break;
    }
    return ncclInvalidArgument;
  }

  // Returns null, without an error, if a rank cannot have a window. All ranks
  // run one version of NCCL, or it would have refused the group.
  absl::StatusOr<std::shared_ptr<NcclMemory>> AllocateWindow(
      int64_t bytes, absl::string_view what) {
    FSDP_RETURN_IF_ERROR(RefuseCapture(what));
    const bool is_symmetric = options_.windows == NcclWindows::kSymmetric ||
                              HasAbortableNcclWindows();
    std::shared_ptr<NcclMemory> memory;
    const auto allocate = [&]() -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(memory, NcclMemory::Allocate(group_, bytes));
      return absl::OkStatus();
    };
    const auto register_window = [&] { return memory->Register(is_symmetric); };
    const auto true_on_all = [&](bool mine) { return TrueOnAll(mine, what); };
    const absl::StatusOr<WindowOutcome> outcome =
        AgreeOnWindow({allocate, register_window, true_on_all});
    if (!outcome.ok()) {
      group_->Fail(outcome.status());
      return outcome.status();
    }
    registers_windows_ = *outcome != WindowOutcome::kRefused;
    return *outcome == WindowOutcome::kWindow ? memory : nullptr;
  }

  absl::Status RefuseCapture(absl::string_view what) const {
    FSDP_ASSIGN_OR_RETURN(const bool is_captured, group_->IsBeingCaptured());
    if (!is_captured) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        what, " on ", ToString(),
        ": the host has to wait for the other ranks, and cannot while the "
        "current stream is being captured into a CUDA graph; do it before"));
  }

  // Returns the ranks that pass `color`, in the order of their keys, as NCCL
  // orders them. A `topic` can be used once.
  absl::StatusOr<std::vector<int>> MembersOf(absl::string_view topic, int color,
                                             int key) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                          ExchangeByStore(store_, topic, rank(), names(),
                                          absl::StrCat(color, " ", key),
                                          absl::Now() + options_.timeout));
    std::vector<SplitRequest> requests(world_size());
    for (int peer = 0; peer < world_size(); ++peer) {
      const std::pair<absl::string_view, absl::string_view> fields =
          absl::StrSplit(texts[peer], ' ');
      if (!absl::SimpleAtoi(fields.first, &requests[peer].color) ||
          !absl::SimpleAtoi(fields.second, &requests[peer].key)) {
        return absl::UnavailableError(
            absl::StrCat("split on ", Place(), ": ", names().Name(peer),
                         " has sent neither color nor key: another program, or "
                         "another build of this"));
      }
    }
    return MembersByColor(requests)[color];
  }

  absl::StatusOr<bool> TrueOnAll(bool mine, absl::string_view label) {
    at::Tensor flag;
    FSDP_RETURN_IF_ERROR(TorchToStatus(label, [&] {
      flag = at::full(
          {1}, mine ? 1 : 0,
          at::TensorOptions().dtype(at::kInt).device(group_->device()));
    }));
    FSDP_ASSIGN_OR_RETURN(auto work, AllReduce(flag, ReduceOp::kMin, label));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + options_.timeout));
    bool on_all = false;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(label, [&] { on_all = flag.item<int>() != 0; }));
    return on_all;
  }

  const std::shared_ptr<NcclGroup> group_;
  const StorePtr store_;
  const NcclOptions options_;
  bool registers_windows_;  // until a rank is refused one
  int num_splits_ = 0;
};

CreatedCommunicator NcclCommunicator::Split(int color, int key) {
  FSDP_RETURN_IF_ERROR(CheckColor(color));
  FSDP_RETURN_IF_ERROR(RefuseCapture("split"));
  // A group in which a rank has failed is not split.
  FSDP_RETURN_IF_ERROR(TrueOnAll(true, "split").status());
  const std::string what = absl::StrCat("split", num_splits_++);
  const absl::StatusOr<std::vector<int>> found = MembersOf(what, color, key);
  if (!found.ok()) {
    // The others are on their way into the split.
    group_->Fail(found.status());
    return found.status();
  }
  const std::vector<int>& members = *found;
  auto handle =
      group_->handle().Split(color, key, absl::Now() + options_.timeout);
  if (!handle.ok()) {
    group_->Fail(handle.status());
    return handle.status();
  }
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      absl::StrCat(what, "/color", color), store_);
  auto group =
      NcclGroup::Create(*std::move(handle), group_->device(), store,
                        {RankAmong(members, rank()), names().Part(members),
                         options_.timeout, options_.diagnosis_timeout});
  FSDP_ASSIGN_OR_RETURN(const bool all, TrueOnAll(group.ok(), "split"));
  FSDP_RETURN_IF_ERROR(group.status());
  if (!all) {
    return absl::UnavailableError(absl::StrCat(
        "split on ", Place(),
        ": another rank could not make its part; its own error says why"));
  }
  return std::make_unique<NcclCommunicator>(*std::move(group), store, options_);
}

// Rank 0 makes the id of the group, the others read it in the store. The error
// of a rank that is not `ready` is returned by all.
absl::StatusOr<ncclUniqueId> ShareId(const StorePtr& store, int rank,
                                     int world_size, const absl::Status& ready,
                                     absl::Time deadline) {
  ncclUniqueId id;
  const auto make = [&]() -> absl::StatusOr<std::string> {
    FSDP_RETURN_IF_ERROR(ready);
    if (rank != 0) return std::string();
    FSDP_RETURN_IF_ERROR(NcclToStatus(ncclGetUniqueId(&id),
                                      "make the id of an NCCL group",
                                      ncclGetLastError(nullptr)));
    return std::string(id.internal, sizeof(id.internal));
  };
  FSDP_ASSIGN_OR_RETURN(
      const std::vector<std::string> shared,
      ExchangeByStore(store, "nccl_id", rank, RankNames(world_size), make(),
                      deadline));
  if (shared[0].size() != sizeof(id.internal)) {
    return absl::UnavailableError(
        "rank 0 has sent no id of the group: another program, or another build "
        "of this");
  }
  std::memcpy(id.internal, shared[0].data(), sizeof(id.internal));
  return id;
}

CreatedCommunicator Create(const StorePtr& store, int rank, int world_size,
                           const NcclOptions& options) {
  const absl::Time deadline = absl::Now() + options.timeout;
  const absl::StatusOr<c10::Device> device = FindGpu(options.device);
  FSDP_ASSIGN_OR_RETURN(
      const ncclUniqueId id,
      ShareId(store, rank, world_size, device.status(), deadline));
  absl::StatusOr<std::unique_ptr<NcclHandle>> handle;
  FSDP_RETURN_IF_ERROR(TorchToStatus("use a GPU", [&] {
    const c10::DeviceGuard guard(*device);
    handle = NcclHandle::Connect(id, rank, world_size, deadline);
  }));
  FSDP_RETURN_IF_ERROR(handle.status());
  FSDP_ASSIGN_OR_RETURN(
      auto group,
      NcclGroup::Create(*std::move(handle), *device, store,
                        {rank, RankNames(world_size), options.timeout,
                         options.diagnosis_timeout}));
  return std::make_unique<NcclCommunicator>(std::move(group), store, options);
}

}  // namespace

CreatedCommunicator CreateNcclCommunicator(const StorePtr& store, int rank,
                                           int world_size,
                                           const NcclOptions& options) {
  const std::string what =
      absl::StrCat("create the nccl group on rank ", rank, " of ", world_size);
  if (store == nullptr || world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": there must be a store and 0 <= rank < world size"));
  }
  return Annotate(Create(store, rank, world_size, options), what);
}

ConnectDevice NcclBackend(const NcclOptions& options) {
  return [options](const DeviceMeeting& meeting) -> CreatedCommunicator {
    NcclOptions own = options;
    own.timeout = meeting.timeout;
    FSDP_ASSIGN_OR_RETURN(own.device, TakeGpu(own.device, meeting.local_rank));
    return CreateNcclCommunicator(meeting.store, meeting.host.rank(),
                                  meeting.host.world_size(), own);
  };
}

}  // namespace fsdp::comm
