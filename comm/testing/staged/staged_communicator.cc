#include "comm/testing/staged/staged_communicator.h"

#include <ATen/core/Tensor.h>

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
