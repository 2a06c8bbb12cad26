#include "fsdp/comm_hooks.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp {
namespace {

using ::fsdp::comm::ReduceOp;
using ::fsdp::comm::Work;

// Multiplied before the sum is rounded, so that one in fp16 does not overflow.
double ScaleFor(const comm::Communicator& group, c10::ScalarType dtype) {
  return MeanOver(group.world_size(), dtype).before;
}

at::Tensor Compress(const at::Tensor& values, double scale,
                    c10::ScalarType dtype) {
  return scale == 1 ? values.to(dtype) : values.mul(scale).to(dtype);
}

// Widens the result once it is there, and takes the scale back.
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
