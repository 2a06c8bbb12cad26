#include "fsdp/runtime/gradient_copy.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/device_streams.h"
#include "device_ops/pack.h"
#include "device_ops/streaming_copy.h"

namespace fsdp {
namespace {

// The ways around operators below are for tensors on the host, where calling
// one costs more than what it does to a few bytes.
constexpr size_t kFewBytes = 16 << 10;
// The gradients of a unit: by the time that they are reduced, other tensors of
// backward have taken their place in a core's caches.
constexpr int64_t kTooMuchForCaches = 4 << 20;
// Threads share copies of at least so many bytes each.
constexpr int64_t kGrainBytes = 256 << 10;

void Copy(const at::Tensor& target, const at::Tensor& source) {
  if (target.numel() == 0) return;
  if (target.is_cpu() && source.is_cpu() && target.nbytes() <= kFewBytes &&
      target.scalar_type() == source.scalar_type()) {
    std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(),
                target.nbytes());
  } else {
    target.copy_(source);
  }
}

}  // namespace

void CopyScaled(at::Tensor target, const at::Tensor& source, double scale) {
  if (HasStreams(target.device())) {
    device_ops::CopyScaled(target, source, scale);
  } else if (scale == 1) {
    Copy(target, source);
  } else if (target.scalar_type() == source.scalar_type()) {
    at::mul_out(target, source, at::Scalar(scale));
  } else if (target.element_size() > source.element_size()) {
    target.copy_(source).mul_(scale);
  } else {
    target.copy_(source.mul(scale));
  }
}

void CopyGradient(const at::Tensor& source, double scale, int64_t buffer_bytes,
                  const at::Tensor& target) {
  const bool goes_past_caches =
      scale == 1 && buffer_bytes >= kTooMuchForCaches && target.is_cpu() &&
      source.is_cpu() && target.scalar_type() == source.scalar_type() &&
      target.nbytes() > kFewBytes;
  if (!goes_past_caches) return CopyScaled(target, source, scale);
  auto* const to = static_cast<char*>(target.mutable_data_ptr());
  const auto* const from = static_cast<const char*>(source.const_data_ptr());
  at::parallel_for(0, static_cast<int64_t>(target.nbytes()), kGrainBytes,
                   [&](int64_t begin, int64_t end) {
                     device_ops::StreamingCopy(to + begin, from + begin,
                                               end - begin);
                   });
}

}  // namespace fsdp
