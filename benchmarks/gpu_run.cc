#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/measure.h"
#include "comm/testing/loopback_communicator.h"

namespace fsdp::benchmarks {
namespace {

c10::DeviceAllocator* AllocatorOf(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  return dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
}

}  // namespace

std::shared_ptr<comm::Communicator> LoopbackGroup(const Place& place) {
  comm::LoopbackOptions options;
  options.place = {/*rank=*/0, place.ranks};
  options.device = place.device;
  options.prefers_scaled_inputs = true;  // as NCCL does
  return ValueOrThrow(comm::CreateLoopback(options));
}

Contender::Contender(c10::Device device, int warm_up,
                     const std::function<Repeated()>& make)
    : device_(device) {
  c10::DeviceAllocator* const allocator = AllocatorOf(device);
  counts_memory = allocator != nullptr;
  const auto held = [&]() -> c10::CachingAllocator::Stat {
    if (!counts_memory) return {};
    return allocator->getDeviceStats(device.index())
        .allocated_bytes[static_cast<size_t>(
            c10::CachingAllocator::StatType::AGGREGATE)];
  };
  const int64_t before = held().current;
  repeated_ = make();
  for (int i = 0; i < warm_up; ++i) {
    if (counts_memory) allocator->resetPeakStats(device.index());
    Run();
  }
  resident_bytes = held().current - before;
  peak_bytes = held().peak - before;
  for (auto* const seconds : {&host, &whole, &then}) seconds->clear();
}

void Contender::Run() {
  // The device has done all that it was given before.
  const auto seconds = [begin = absl::Now()] {
    return absl::ToDoubleSeconds(absl::Now() - begin);
  };
  losses.push_back(repeated_.run());
  host.push_back(seconds());
  Synchronize(device_);
  if (repeated_.then) {
    then.push_back(Seconds([this] {
      repeated_.then();
      Synchronize(device_);
    }));
  }
  whole.push_back(seconds());
}

CountingRows::CountingRows(const gpt::GptConfig& model, int64_t batch,
                           c10::Device device) {
  const at::Tensor counts = at::arange(model.seq + 1, at::kLong);
  const at::Tensor starts = at::arange(batch, at::kLong) * 31;
  const at::Tensor rows =
      (starts.unsqueeze(1) + counts.unsqueeze(0)).remainder(model.vocab);
  tokens = rows.narrow(1, 0, model.seq).contiguous().to(device);
  targets = rows.narrow(1, 1, model.seq).contiguous().to(device);
}

at::Tensor LossOf(const at::Tensor& logits, const CountingRows& rows) {
  return gpt::NextTokenLoss(logits.to(at::kFloat), rows.targets);
}

void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module) {
  FSDP_CHECK(DeferredInit::IsActive());
  const c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor there =
        at::empty(parameter.sizes(), at::TensorOptions(device).dtype(dtype));
    // set_data() does the same, but not for every device.
    parameter.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
  }
  for (const std::shared_ptr<torch::nn::Module>& part : module.modules()) {
    if (auto* linear = part->as<torch::nn::Linear>()) {
      linear->reset_parameters();
    } else if (auto* embedding = part->as<torch::nn::Embedding>()) {
      embedding->reset_parameters();
    } else if (auto* norm = part->as<torch::nn::LayerNorm>()) {
      norm->reset_parameters();
    } else {
      FSDP_CHECK(part->parameters(/*recurse=*/false).empty());
    }
  }
}

}  // namespace fsdp::benchmarks
