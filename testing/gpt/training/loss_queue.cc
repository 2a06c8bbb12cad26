#include "testing/gpt/training/loss_queue.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "absl/status/status.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace gpt {

void LossQueue::Push(const at::Tensor& loss) {
  const c10::NoGradGuard no_grad;
  Loss pushed;
  pushed.value = at::empty(
      {}, at::TensorOptions(at::kDouble).pinned_memory(!loss.is_cpu()));
  pushed.value.copy_(loss.detach().to(at::kDouble), /*non_blocking=*/true);
  pushed.there.Record(loss.device());
  losses_.push_back(std::move(pushed));
}

absl::StatusOr<double> LossQueue::Pop(absl::Time deadline) {
  FSDP_CHECK(!losses_.empty());
  const Loss loss = std::move(losses_.front());
  losses_.pop_front();
  bool is_there = false;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus(
      "reading the loss", [&] { is_there = loss.there.Wait(deadline); }));
  if (is_there) return *loss.value.const_data_ptr<double>();
  return absl::DeadlineExceededError(
      "reading the loss: the device has not computed it");
}

}  // namespace gpt
