#include "adapters/int8_rows.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "base/check.h"
#include "device_ops/block_quantization.h"

namespace fsdp::adapters {
namespace {

constexpr int64_t kScaleBytes = sizeof(float);

int64_t ScalesBegin(const Int8Rows& layout) {
  return (layout.numel + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
}

int64_t NumScales(const Int8Rows& layout) {
  return device_ops::NumBlocks(layout.numel, layout.block);
}

at::Tensor ValuesOf(const Int8Rows& layout, const at::Tensor& packed) {
  return packed.view(at::kChar).narrow(1, 0, layout.numel);
}

// What the kernels take: some formats of files are too narrow for them.
at::Tensor Quantizable(const at::Tensor& rows) {
  return (rows.itemsize() == 1 ? rows.to(at::kFloat) : rows).contiguous();
}

}  // namespace

Int8Rows Int8Rows::Of(int64_t numel, int64_t most) {
  const int64_t blocks = device_ops::NumBlocks(numel, most);
  return {numel, device_ops::NumBlocks(numel, blocks)};
}

int64_t Int8Rows::row_bytes() const {
  return ScalesBegin(*this) + NumScales(*this) * kScaleBytes;
}

at::Tensor Pack(const Int8Rows& layout, const at::Tensor& rows) {
  FSDP_CHECK(rows.dim() == 2 && rows.size(1) == layout.numel);
  const c10::NoGradGuard no_grad;
  at::Tensor packed = at::zeros({rows.size(0), layout.row_bytes()},
                                rows.options().dtype(at::kByte));
  device_ops::Quantize(Quantizable(rows), layout.block,
                       ValuesOf(layout, packed), ScalesOf(layout, packed));
  return packed;
}

at::Tensor Unpack(const Int8Rows& layout, const at::Tensor& packed,
                  c10::ScalarType dtype) {
  FSDP_CHECK(packed.dim() == 2 && packed.size(1) == layout.row_bytes());
  const c10::NoGradGuard no_grad;
  at::Tensor rows =
      at::empty({packed.size(0), layout.numel}, packed.options().dtype(dtype));
  device_ops::Dequantize(rows, ValuesOf(layout, packed),
                         ScalesOf(layout, packed), layout.block);
  return rows;
}

at::Tensor ScalesOf(const Int8Rows& layout, const at::Tensor& packed) {
  return packed.view(at::kFloat)
      .narrow(1, ScalesBegin(layout) / kScaleBytes, NumScales(layout));
}

}  // namespace fsdp::adapters
