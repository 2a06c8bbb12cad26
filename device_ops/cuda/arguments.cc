#include "device_ops/cuda/arguments.h"

#include <c10/util/Exception.h>

#include "device_ops/pack.h"

namespace fsdp::device_ops::cuda {

Element ElementOf(c10::ScalarType dtype) {
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

std::vector<PackItem> PackItems(at::TensorList sources, c10::IntArrayRef pieces,
                                c10::IntArrayRef zeros, c10::IntArrayRef ones) {
  const std::vector<PackedRange> ranges =
      PackedRanges(sources, pieces, zeros, ones);
  std::vector<PackItem> items;
  items.reserve(ranges.size());
  for (const PackedRange& range : ranges) {
    items.push_back({range.source, ElementOf(range.dtype), range.begin,
                     range.numel, static_cast<float>(range.value)});
  }
  return items;
}

RotatedHeads RotationOf(const at::Tensor& out, const at::Tensor& x,
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

}  // namespace fsdp::device_ops::cuda
