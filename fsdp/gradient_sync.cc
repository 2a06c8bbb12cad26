#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/model_view.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp {
namespace {

using SetOne = absl::FunctionRef<absl::Status(ShardedModel& model, int unit)>;

absl::Status ForEachUnit(torch::nn::Module& module, bool recurse, SetOne set) {
  bool any = false;
  const auto set_if_unit = [&](const torch::nn::Module& candidate) {
    const std::optional<UnitHandle> unit = FindUnit(candidate);
    if (!unit.has_value()) return absl::OkStatus();
    any = true;
    return set(*unit->model(), unit->unit());
  };
  FSDP_RETURN_IF_ERROR(set_if_unit(module));
  if (recurse) {
    for (const auto& inner : module.modules(/*include_self=*/false)) {
      FSDP_RETURN_IF_ERROR(set_if_unit(*inner));
    }
  }
  if (any) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "module ", module.name(), recurse ? " is and has no unit" : " is no unit",
      " of a sharded model, so it has no gradients to reduce: see "
      "Describe() for the units"));
}

}  // namespace

absl::Status SetRequiresGradientSync(torch::nn::Module& module, bool required,
                                     bool recurse) {
  return ForEachUnit(module, recurse, [&](ShardedModel& model, int unit) {
    return model.SetUnitSynchronizes(unit, required);
  });
}

absl::Status SetRequiresAllReduce(torch::nn::Module& module, bool required,
                                  bool recurse) {
  return ForEachUnit(module, recurse, [&](ShardedModel& model, int unit) {
    return model.SetUnitAllReduces(unit, required);
  });
}

namespace {

using ::fsdp::comm::ReduceOp;
using ::fsdp::comm::Work;

// Values are scaled before they are rounded, so that an fp16 sum does not
// overflow.
double ScaleFor(const comm::Communicator& group, c10::ScalarType dtype) {
  return MeanOver(group.world_size(), dtype).before;
}

at::Tensor Compress(const at::Tensor& values, double scale,
                    c10::ScalarType dtype) {
  return scale == 1 ? values.to(dtype) : values.mul(scale).to(dtype);
}

// Widens the result once it is there, and takes back the scale.
class CompressedWork final : public Work {
 public:
  CompressedWork(std::unique_ptr<Work> work, at::Tensor compressed,
                 double scale, at::Tensor result)
      : work_(std::move(work)),
        compressed_(std::move(compressed)),
        scale_(scale),
        result_(std::move(result)) {}

  absl::Status Wait(absl::Time deadline) override {
    return Finish(work_->Wait(deadline));
  }
  absl::Status BlockCurrentStream() override {
    return Finish(work_->BlockCurrentStream());
  }

 private:
  absl::Status Finish(absl::Status status) {
    if (status.ok() && compressed_.defined()) {
      c10::NoGradGuard no_grad;
      result_.copy_(compressed_);
      if (scale_ != 1) result_.div_(scale_);
      compressed_.reset();
    }
    return status;
  }

  const std::unique_ptr<Work> work_;
  at::Tensor compressed_;
  const double scale_;
  at::Tensor result_;
};

}  // namespace

ReduceScatterHook CompressedReduceScatter(c10::ScalarType dtype) {
  return [dtype](const ReduceScatterCall& call)
             -> absl::StatusOr<std::unique_ptr<Work>> {
    c10::NoGradGuard no_grad;
    const double scale = ScaleFor(call.group, dtype);
    const at::Tensor whole = Compress(call.whole, scale, dtype);
    const int64_t numel = call.own.numel();
    const at::Tensor own = whole.narrow(0, call.group.rank() * numel, numel);
    FSDP_ASSIGN_OR_RETURN(
        std::unique_ptr<Work> work,
        call.group.ReduceScatter(own, whole, ReduceOp::kSum, call.unit));
    return std::make_unique<CompressedWork>(std::move(work), own, scale,
                                            call.own);
  };
}

AllReduceHook CompressedAllReduce(c10::ScalarType dtype) {
  return [dtype](const AllReduceCall& call)
             -> absl::StatusOr<std::unique_ptr<Work>> {
    c10::NoGradGuard no_grad;
    const double scale = ScaleFor(call.group, dtype);
    const at::Tensor own = Compress(call.own, scale, dtype);
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Work> work,
                          call.group.AllReduce(own, ReduceOp::kSum, call.unit));
    return std::make_unique<CompressedWork>(std::move(work), own, scale,
                                            call.own);
  };
}

}  // namespace fsdp
