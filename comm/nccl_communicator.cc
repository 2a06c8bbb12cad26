#include "comm/nccl_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/call.h"
#include "comm/nccl_connect.h"
#include "comm/nccl_group.h"
#include "comm/nccl_handle.h"
#include "comm/nccl_memory.h"
#include "comm/nccl_scaled_sum.h"
#include "comm/nccl_status.h"
#include "comm/unwinding.h"
#include "comm/watched_group.h"
#include "comm/work.h"
#include "device_ops/pack.h"

namespace fsdp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

void Nothing() {}

size_t Count(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel());
}

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclGroup> group,
           std::shared_ptr<NcclGroup::Operation> operation,
           std::vector<at::Tensor> tensors)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        tensors_(std::move(tensors)) {}
  ~NcclWork() override {
    if (!is_ordered_) group_->Keep(*operation_, std::move(tensors_));
  }

  absl::Status Wait(absl::Time deadline) override {
    if (!result_) {
      result_ = group_->Wait(*operation_, deadline);
      is_ordered_ = true;
      tensors_.clear();
    }
    return *result_;
  }

  absl::Status BlockCurrentStream() override {
    if (result_) return *result_;
    const absl::Status status = group_->BlockCurrentStream(*operation_);
    is_ordered_ = is_ordered_ || status.ok();
    return status;
  }

 private:
  const std::shared_ptr<NcclGroup> group_;
  const std::shared_ptr<NcclGroup::Operation> operation_;
  std::vector<at::Tensor> tensors_;
  bool is_ordered_ = false;  // what frees the tensors does so in time
  absl::optional<absl::Status> result_;
};

// A sum whose inputs NCCL multiplies with `scale`.
ncclResult_t ReduceScatterPremultiplied(const void* in, void* out, size_t count,
                                        at::ScalarType dtype, double scale,
                                        ncclComm_t comm, cudaStream_t stream) {
  union {
    double as_double;
    float as_float;
    uint16_t as_half;
  } factor;
  const auto rounded = static_cast<float>(scale);
  switch (dtype) {
    case at::ScalarType::Double:
      factor.as_double = scale;
      break;
    case at::ScalarType::Half:
      factor.as_half = c10::Half(rounded).x;
      break;
    case at::ScalarType::BFloat16:
      factor.as_half = c10::BFloat16(rounded).x;
      break;
    default:
      factor.as_float = rounded;
      break;
  }
  ncclRedOp_t op = ncclSum;
  ncclResult_t result = ncclRedOpCreatePreMulSum(&op, &factor, NcclDtype(dtype),
                                                 ncclScalarHostImmediate, comm);
  if (result != ncclSuccess) return result;
  result =
      ncclReduceScatter(in, out, count, NcclDtype(dtype), op, comm, stream);
  const ncclResult_t destroyed = ncclRedOpDestroy(op, comm);
  return result == ncclSuccess ? destroyed : result;
}

bool HasFailed(ncclResult_t result) {
  return result != ncclSuccess && result != ncclInProgress;
}

// The group is closed also where a call in it has failed.
ncclResult_t AllToAllBySends(const at::Tensor& in, const at::Tensor& out,
                             int ranks, ncclComm_t comm, cudaStream_t stream) {
  const ncclDataType_t dtype = NcclDtype(in.scalar_type());
  const size_t count = Count(in) / ranks;
  const size_t bytes = in.nbytes() / ranks;
  const char* from = static_cast<const char*>(in.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  ncclResult_t result = ncclGroupStart();
  if (HasFailed(result)) return result;
  for (int peer = 0; peer < ranks && !HasFailed(result); ++peer) {
    result = ncclSend(from + peer * bytes, count, dtype, peer, comm, stream);
    if (HasFailed(result)) break;
    result = ncclRecv(to + peer * bytes, count, dtype, peer, comm, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return HasFailed(result) ? result : ended;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclGroup> group, StorePtr store,
                   const NcclOptions& options)
      : group_(std::move(group)), store_(std::move(store)), options_(options) {}
  ~NcclCommunicator() override {
    if (unwinding_) group_->Abort(EndedByException());
    group_->Leave();
  }

  int rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  absl::Duration default_timeout() const override { return options_.timeout; }
  std::string ToString() const override {
    return absl::StrCat("nccl on ", group_->device().str(), ", rank ", rank(),
                        " of ", world_size());
  }

  // NVLink switches and symmetric kernels do plain sums alone.
  bool PrefersScaledInputs() const override { return true; }
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                      int key) override;
  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

 protected:
  absl::StatusOr<std::unique_ptr<Work>> DoAllGather(
      const at::Tensor& out, const at::Tensor& in,
      absl::string_view label) override {
    return Start(
        Collective::kAllGather, label, in, {out, in},
        [&](ncclComm_t comm, cudaStream_t stream) {
          return ncclAllGather(in.const_data_ptr(), out.mutable_data_ptr(),
                               Count(in), NcclDtype(in.scalar_type()), comm,
                               stream);
        },
        Nothing);
  }

  absl::StatusOr<std::unique_ptr<Work>> DoReduceScatter(
      const at::Tensor& out, const at::Tensor& in, ReduceOp op,
      absl::string_view label) override {
    return Start(
        Collective::kReduceScatter, label, out, {out, in},
        [&](ncclComm_t comm, cudaStream_t stream) {
          return ncclReduceScatter(in.const_data_ptr(), out.mutable_data_ptr(),
                                   Count(out), NcclDtype(in.scalar_type()),
                                   NcclReduction(op), comm, stream);
        },
        Nothing);
  }

  absl::StatusOr<std::unique_ptr<Work>> DoReduceScatterScaled(
      const at::Tensor& out, const at::Tensor& in, ScaledSum sum,
      absl::string_view label) override;

  absl::StatusOr<std::unique_ptr<Work>> DoAllToAll(
      const at::Tensor& out, const at::Tensor& in,
      absl::string_view label) override {
    const int ranks = world_size();
    return Start(
        Collective::kAllToAll, label, in, {out, in},
        [&](ncclComm_t comm, cudaStream_t stream) {
          return AllToAllBySends(in, out, ranks, comm, stream);
        },
        Nothing);
  }

  absl::StatusOr<std::unique_ptr<Work>> DoAllReduce(
      const at::Tensor& tensor, ReduceOp op, absl::string_view label) override {
    return Start(
        Collective::kAllReduce, label, tensor, {tensor},
        [&](ncclComm_t comm, cudaStream_t stream) {
          void* data = tensor.mutable_data_ptr();
          return ncclAllReduce(data, data, Count(tensor),
                               NcclDtype(tensor.scalar_type()),
                               NcclReduction(op), comm, stream);
        },
        Nothing);
  }

  absl::StatusOr<std::unique_ptr<Work>> DoBroadcast(
      const at::Tensor& tensor, int root, absl::string_view label) override {
    return Start(
        Collective::kBroadcast, label, tensor, {tensor},
        [&](ncclComm_t comm, cudaStream_t stream) {
          void* data = tensor.mutable_data_ptr();
          return ncclBroadcast(data, data, Count(tensor),
                               NcclDtype(tensor.scalar_type()), root, comm,
                               stream);
        },
        Nothing);
  }

 private:
  // `counted` is the tensor whose dtype and count all ranks share.
  absl::StatusOr<std::unique_ptr<Work>> Start(Collective collective,
                                              absl::string_view label,
                                              const at::Tensor& counted,
                                              std::vector<at::Tensor> tensors,
                                              NcclGroup::Enqueue enqueue,
                                              NcclGroup::Finish finish);

  // Whether `mine` is true on every rank.
  absl::StatusOr<bool> TrueOnAll(bool mine, absl::string_view label);

  const std::shared_ptr<NcclGroup> group_;
  const StorePtr store_;
  const NcclOptions options_;
  int num_splits_ = 0;
  const Unwinding unwinding_;
};

absl::StatusOr<std::unique_ptr<Work>> NcclCommunicator::Start(
    Collective collective, absl::string_view label, const at::Tensor& counted,
    std::vector<at::Tensor> tensors, NcclGroup::Enqueue enqueue,
    NcclGroup::Finish finish) {
  Call call{collective, std::string(label),
            std::string(DtypeName(counted.scalar_type())), counted.numel(), ""};
  if (counted.device() != group_->device()) {
    return absl::UnimplementedError(
        absl::StrCat(comm::ToString(call), " on rank ", rank(), " of ",
                     world_size(), ": nccl takes tensors on ",
                     group_->device().str(), ", not ", counted.device().str()));
  }
  const auto bytes = static_cast<int64_t>(tensors[0].nbytes());
  const auto unless_empty = [&](ncclComm_t comm, cudaStream_t stream) {
    return counted.numel() == 0 ? ncclSuccess : enqueue(comm, stream);
  };
  FSDP_ASSIGN_OR_RETURN(auto operation, group_->Launch(std::move(call), bytes,
                                                       unless_empty, finish));
  return std::make_unique<NcclWork>(group_, std::move(operation),
                                    std::move(tensors));
}

absl::StatusOr<std::unique_ptr<Work>> NcclCommunicator::DoReduceScatterScaled(
    const at::Tensor& out, const at::Tensor& in, ScaledSum sum,
    absl::string_view label) {
  const at::ScalarType dtype = in.scalar_type();
  // What is added to `out` can be scaled there.
  const NcclScaling scaling = sum.accumulate
                                  ? NcclScaling{1, sum.scale}
                                  : SpreadScale(sum.scale, dtype, world_size());
  const bool is_direct = out.scalar_type() == dtype && !sum.accumulate;
  const at::Tensor result =
      is_direct ? out : in.narrow(0, rank() * out.numel(), out.numel());
  const auto enqueue = [&](ncclComm_t comm, cudaStream_t stream) {
    const void* from = in.const_data_ptr();
    void* to = result.mutable_data_ptr();
    if (scaling.before == 1) {
      return ncclReduceScatter(from, to, Count(out), NcclDtype(dtype), ncclSum,
                               comm, stream);
    }
    return ReduceScatterPremultiplied(from, to, Count(out), dtype,
                                      scaling.before, comm, stream);
  };
  const auto finish = [&] {
    const c10::NoGradGuard no_grad;
    if (sum.accumulate) {
      device_ops::AddScaled(out, result, scaling.after);
    } else if (!is_direct || scaling.after != 1) {
      device_ops::CopyScaled(out, result, scaling.after);
    }
  };
  return Start(Collective::kReduceScatter, label, result, {in, out}, enqueue,
               finish);
}

absl::StatusOr<bool> NcclCommunicator::TrueOnAll(bool mine,
                                                 absl::string_view label) {
  at::Tensor flag;
  FSDP_RETURN_IF_ERROR(TorchToStatus(label, [&] {
    flag =
        at::full({1}, mine ? 1 : 0,
                 at::TensorOptions().dtype(at::kInt).device(group_->device()));
  }));
  FSDP_ASSIGN_OR_RETURN(auto work, AllReduce(flag, ReduceOp::kMin, label));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + options_.timeout));
  bool on_all = false;
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(label, [&] { on_all = flag.item<int>() != 0; }));
  return on_all;
}

absl::StatusOr<at::Tensor> NcclCommunicator::AllocateSymmetric(int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot allocate ", bytes, " bytes"));
  }
  const std::string what = absl::StrCat("allocate ", bytes, " symmetric bytes");
  if (bytes > 0 && options_.windows != NcclWindows::kNone) {
    auto memory = HasNcclWindows()
                      ? NcclMemory::Allocate(group_, bytes)
                      : absl::UnimplementedError("NCCL has no windows");
    FSDP_ASSIGN_OR_RETURN(const bool on_all, TrueOnAll(memory.ok(), what));
    if (on_all) {
      // NCCL refuses ranks of different versions.
      const absl::Status registered =
          (*memory)->Register(options_.windows == NcclWindows::kSymmetric ||
                              HasAbortableNcclWindows());
      if (!registered.ok()) {
        // The other ranks may be in there still.
        group_->Fail(registered);
        return registered;
      }
      return NcclMemory::AsTensor(*memory);
    }
  }
  at::Tensor plain;
  FSDP_RETURN_IF_ERROR(TorchToStatus(what, [&] {
    plain = at::empty(
        {bytes}, at::TensorOptions().dtype(at::kByte).device(group_->device()));
  }));
  return plain;
}

WatchedGroup::Options GroupOptions(int rank, int world_size,
                                   const NcclOptions& options) {
  WatchedGroup::Options result;
  result.rank = rank;
  result.world_size = world_size;
  result.timeout = options.timeout;
  result.diagnosis_timeout = options.diagnosis_timeout;
  return result;
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclCommunicator::Split(int color,
                                                                      int key) {
  if (color < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("split on rank ", rank(), " of ", world_size(), ": color ",
                     color, " is negative"));
  }
  // Nobody splits a group in which a rank has failed.
  FSDP_RETURN_IF_ERROR(TrueOnAll(true, "split").status());
  absl::StatusOr<std::unique_ptr<NcclHandle>> handle;
  FSDP_RETURN_IF_ERROR(TorchToStatus("split an NCCL group", [&] {
    const c10::DeviceGuard guard(group_->device());
    handle = group_->handle().Split(color, key, absl::Now() + options_.timeout);
  }));
  if (!handle.ok()) {
    group_->Fail(handle.status());
    return handle.status();
  }
  FSDP_ASSIGN_OR_RETURN(const int new_rank, (*handle)->Rank());
  FSDP_ASSIGN_OR_RETURN(const int new_size, (*handle)->Size());
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      absl::StrCat("split", num_splits_++, "/color", color), store_);
  FSDP_ASSIGN_OR_RETURN(
      auto group,
      NcclGroup::Create(*std::move(handle), group_->device(), store,
                        GroupOptions(new_rank, new_size, options_)));
  return std::make_unique<NcclCommunicator>(std::move(group), store, options_);
}

absl::StatusOr<std::unique_ptr<Communicator>> Create(
    const StorePtr& store, int rank, int world_size,
    const NcclOptions& options) {
  const absl::Time deadline = absl::Now() + options.timeout;
  FSDP_ASSIGN_OR_RETURN(const c10::Device device, FindGpu(options.device));
  FSDP_ASSIGN_OR_RETURN(auto handle,
                        ConnectNccl(store, device, rank, world_size, deadline));
  FSDP_ASSIGN_OR_RETURN(
      auto group, NcclGroup::Create(std::move(handle), device, store,
                                    GroupOptions(rank, world_size, options)));
  return std::make_unique<NcclCommunicator>(std::move(group), store, options);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(
    const StorePtr& store, int rank, int world_size,
    const NcclOptions& options) {
  const std::string what =
      absl::StrCat("create the nccl group on rank ", rank, " of ", world_size);
  if (store == nullptr || world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": there must be a store and 0 <= rank < world size"));
  }
  auto communicator = Create(store, rank, world_size, options);
  if (!communicator.ok()) return Annotate(communicator.status(), what);
  return communicator;
}

}  // namespace fsdp::comm
