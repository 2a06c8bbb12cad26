#include "comm/testing/staged/staged_communicator.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/testing/staged/staged_queue.h"

namespace fsdp::comm {
namespace {

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
  StartedWork DoAllGather(const at::Tensor& out, const at::Tensor& in,
                          absl::string_view label) override {
    const int64_t n = in.numel();
    const int64_t begin = rank_ * n;
    StagedCall call =
        CallOf(Collective::kAllGather, label, in, begin, out.numel());
    call.target = {out, 0};
    call.run = [n, begin, label = std::string(label)](
                   Communicator& host, const at::Tensor& buffer) {
      return host.AllGather(buffer, RangeOf(buffer, begin, n), label);
    };
    return Start(std::move(call), in.device());
  }

  StartedWork DoReduceScatter(const at::Tensor& out, const at::Tensor& in,
                              ReduceOp op, absl::string_view label) override {
    return Start(ReduceScatterOf(out, in, op, label), in.device());
  }

  StartedWork DoReduceScatterScaled(const at::Tensor& out, const at::Tensor& in,
                                    ScaledSum sum,
                                    absl::string_view label) override {
    const int64_t n = out.numel();
    const at::Tensor scaled = RangeOf(out, 0, n);
    const bool is_direct =
        out.scalar_type() == in.scalar_type() && !sum.accumulate;
    const at::Tensor summed = is_direct ? scaled : RangeOf(in, rank_ * n, n);
    StagedCall call = ReduceScatterOf(summed, in, ReduceOp::kSum, label);
    call.finish = [scaled, summed, sum] { Scale(scaled, summed, sum); };
    return Start(std::move(call), in.device());
  }

  StartedWork DoAllToAll(const at::Tensor& out, const at::Tensor& in,
                         absl::string_view label) override {
    const int64_t n = in.numel();
    StagedCall call = CallOf(Collective::kAllToAll, label, in, 0, 2 * n);
    call.target = {out, n};
    call.run = [n, label = std::string(label)](Communicator& host,
                                               const at::Tensor& buffer) {
      return host.AllToAll(RangeOf(buffer, n, n), RangeOf(buffer, 0, n), label);
    };
    return Start(std::move(call), in.device());
  }

  StartedWork DoAllReduce(const at::Tensor& tensor, ReduceOp op,
                          absl::string_view label) override {
    StagedCall call =
        CallOf(Collective::kAllReduce, label, tensor, 0, tensor.numel());
    call.target = {tensor, 0};
    call.run = [op, label = std::string(label)](Communicator& host,
                                                const at::Tensor& buffer) {
      return host.AllReduce(buffer, op, label);
    };
    return Start(std::move(call), tensor.device());
  }

  StartedWork DoBroadcast(const at::Tensor& tensor, int root,
                          absl::string_view label) override {
    StagedCall call =
        CallOf(Collective::kBroadcast, label, tensor, 0, tensor.numel());
    call.target = {tensor, 0};
    // What is overwritten need not come, and what is there need not go back.
    (rank_ == root ? call.target : call.source).tensor = at::Tensor();
    call.run = [root, label = std::string(label)](Communicator& host,
                                                  const at::Tensor& buffer) {
      return host.Broadcast(buffer, root, label);
    };
    return Start(std::move(call), tensor.device());
  }

 private:
  // The call of `in`, which goes to place `begin` of a buffer of `size`.
  StagedCall CallOf(Collective collective, absl::string_view label,
                    const at::Tensor& in, int64_t begin, int64_t size) const {
    StagedCall call;
    call.name = absl::StrCat(CollectiveName(collective), " of ", label, " on ",
                             Place());
    call.dtype = in.scalar_type();
    call.size = size;
    call.source = {in, begin};
    return call;
  }

  // A reduce-scatter of `in`, whose result goes to `out`.
  StagedCall ReduceScatterOf(const at::Tensor& out, const at::Tensor& in,
                             ReduceOp op, absl::string_view label) const {
    const int64_t n = out.numel();
    const int64_t begin = rank_ * n;
    StagedCall call =
        CallOf(Collective::kReduceScatter, label, in, 0, in.numel());
    call.target = {out, begin};
    call.run = [n, begin, op, label = std::string(label)](
                   Communicator& host, const at::Tensor& buffer) {
      return host.ReduceScatter(RangeOf(buffer, begin, n), buffer, op, label);
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
