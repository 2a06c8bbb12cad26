// The operators by these kernels, on any device that runs them.
#ifndef DEVICE_OPS_CUDA_OPERATORS_H_
#define DEVICE_OPS_CUDA_OPERATORS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <vector>

#include "device_ops/cuda/kernels.h"
#include "device_ops/pack.h"
#include "device_ops/row_layout.h"

namespace fsdp::device_ops::cuda {

// Throws c10::Error for dtypes that the kernels do not know.
inline Element ElementOf(c10::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Float:
      return Element::kFloat;
    case at::ScalarType::Double:
      return Element::kDouble;
    case at::ScalarType::Half:
      return Element::kHalf;
    case at::ScalarType::BFloat16:
      return Element::kBFloat16;
    default:
      TORCH_CHECK(false,
                  "libtorch_fsdp takes float32, float64, float16 and "
                  "bfloat16, not ",
                  c10::toString(dtype));
  }
}

// Convert the arguments of libtorch_fsdp::pack_ and rotate_halves_.
inline std::vector<PackItem> PackItems(at::TensorList sources,
                                       c10::IntArrayRef pieces) {
  const std::vector<PackedRange> ranges = PackedRanges(sources, pieces);
  std::vector<PackItem> items;
  items.reserve(ranges.size());
  for (const PackedRange& range : ranges) {
    items.push_back({range.source, ElementOf(range.dtype), range.begin,
                     range.numel, static_cast<float>(range.value)});
  }
  return items;
}

inline RotatedHeads RotationOf(const at::Tensor& out, const at::Tensor& x,
                               const at::Tensor& cos, const at::Tensor& sin,
                               bool inverse) {
  RotatedHeads heads = {};
  heads.batch = x.size(0);
  heads.heads = x.size(1);
  heads.tokens = x.size(2);
  heads.half = x.size(3) / 2;
  for (int i = 0; i < 3; ++i) {
    // The stride of a single element may be any, and means nothing.
    heads.x_strides[i] = x.size(i) == 1 ? 0 : x.stride(i);
    heads.out_strides[i] = x.size(i) == 1 ? 0 : out.stride(i);
  }
  heads.x = x.const_data_ptr();
  heads.cos = cos.const_data_ptr();
  heads.sin = sin.const_data_ptr();
  heads.out = out.mutable_data_ptr();
  heads.inverse = inverse;
  return heads;
}

// A `Call` lives as long as one call of an operator. It is made with the name
// of the operator and the tensors that it reads and writes, of which at least
// one is written, all on one device; stream() is that of the kernels, and
// Check() throws c10::Error for what a launch returns.
template <typename Call>
struct Operators {
  static void Pack(const at::Tensor& out, at::TensorList sources,
                   c10::IntArrayRef pieces, double scale, bool accumulate) {
    const Call call("pack_", sources, {out});
    const std::vector<PackItem> items = PackItems(sources, pieces);
    call.Check(LaunchPack(items.data(), static_cast<int64_t>(items.size()),
                          ElementOf(out.scalar_type()), out.mutable_data_ptr(),
                          scale, accumulate, call.stream()));
  }

  static void Quantize(const at::Tensor& in, int64_t block,
                       const at::Tensor& values, const at::Tensor& scales) {
    const Call call("quantize_blocks_", {in}, {values, scales});
    call.Check(LaunchQuantize(RowsOf(in, values, scales, block),
                              ElementOf(in.scalar_type()), in.const_data_ptr(),
                              values.mutable_data_ptr<int8_t>(),
                              scales.mutable_data_ptr<float>(), call.stream()));
  }

  static void Dequantize(const at::Tensor& out, const at::Tensor& values,
                         const at::Tensor& scales, int64_t block, double factor,
                         bool accumulate) {
    const Call call("dequantize_blocks_", {values, scales}, {out});
    call.Check(LaunchDequantize(
        RowsOf(out, values, scales, block), ElementOf(out.scalar_type()),
        out.mutable_data_ptr(), values.const_data_ptr<int8_t>(),
        scales.const_data_ptr<float>(), factor, accumulate, call.stream()));
  }

  static void RotateHalves(const at::Tensor& out, const at::Tensor& x,
                           const at::Tensor& cos, const at::Tensor& sin,
                           bool inverse) {
    const Call call("rotate_halves_", {x, cos, sin}, {out});
    call.Check(LaunchRotate(RotationOf(out, x, cos, sin, inverse),
                            ElementOf(out.scalar_type()), call.stream()));
  }

  static void SwiGlu(const at::Tensor& out, const at::Tensor& gate,
                     const at::Tensor& up) {
    const Call call("swiglu_", {gate, up}, {out});
    call.Check(LaunchSwiGlu(out.numel(), ElementOf(out.scalar_type()),
                            gate.const_data_ptr(), up.const_data_ptr(),
                            out.mutable_data_ptr(), call.stream()));
  }

  static void SwiGluBackward(const at::Tensor& of_gate, const at::Tensor& of_up,
                             const at::Tensor& gradient, const at::Tensor& gate,
                             const at::Tensor& up) {
    const Call call("swiglu_backward_", {gradient, gate, up}, {of_gate, of_up});
    call.Check(LaunchSwiGluBackward(
        gate.numel(), ElementOf(gate.scalar_type()), gradient.const_data_ptr(),
        gate.const_data_ptr(), up.const_data_ptr(), of_gate.mutable_data_ptr(),
        of_up.mutable_data_ptr(), call.stream()));
  }

  static void CrossEntropy(const at::Tensor& losses, const at::Tensor& logits,
                           const at::Tensor& targets, int64_t ignored,
                           bool gradient) {
    const Call call("cross_entropy_", {targets}, {losses, logits});
    call.Check(LaunchCrossEntropy(
        logits.size(0), logits.size(1), ElementOf(logits.scalar_type()),
        logits.mutable_data_ptr(), targets.const_data_ptr<int64_t>(), ignored,
        gradient, losses.mutable_data_ptr(), call.stream()));
  }

  // Called in a TORCH_LIBRARY_IMPL().
  static void Register(torch::Library& m) {
    m.impl("pack_", &Pack);
    m.impl("quantize_blocks_", &Quantize);
    m.impl("dequantize_blocks_", &Dequantize);
    m.impl("rotate_halves_", &RotateHalves);
    m.impl("swiglu_", &SwiGlu);
    m.impl("swiglu_backward_", &SwiGluBackward);
    m.impl("cross_entropy_", &CrossEntropy);
  }
};

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_OPERATORS_H_
