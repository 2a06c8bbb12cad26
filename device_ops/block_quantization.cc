#include "device_ops/block_quantization.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "base/check.h"

namespace fsdp::device_ops {
namespace {

at::Tensor AsRows(const at::Tensor& tensor) {
  FSDP_CHECK(tensor.dim() == 1 || tensor.dim() == 2);
  return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor;
}

// The tensors of an operator, as rows.
struct Rows {
  Rows(const at::Tensor& all_numbers, const at::Tensor& all_values,
       const at::Tensor& all_scales, int64_t block)
      : numbers(AsRows(all_numbers)),
        values(AsRows(all_values)),
        scales(AsRows(all_scales)) {
    FSDP_CHECK(0 < block && block <= kMaxBlock);
    for (const at::Tensor* tensor : {&numbers, &values, &scales}) {
      // Neighbours in a row are neighbours in memory.
      FSDP_CHECK(tensor->size(-1) <= 1 || tensor->stride(-1) == 1);
      FSDP_CHECK(tensor->device() == numbers.device());
    }
    FSDP_CHECK(values.scalar_type() == at::kChar);
    FSDP_CHECK(scales.scalar_type() == at::kFloat);
    FSDP_CHECK(values.size(-1) == numbers.size(-1));
    FSDP_CHECK(scales.size(-1) == NumBlocks(numbers.size(-1), block));
    FSDP_CHECK(scales.size(0) == values.size(0));
  }

  const at::Tensor numbers;
  const at::Tensor values;
  const at::Tensor scales;
};

// Throws an error that says what the program lacks, unlike LibTorch's own.
void CheckHasKernel(const c10::OperatorHandle& op, const at::Tensor& values) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(
          c10::legacyExtractDispatchKey(values.key_set())),
      "int8 blocks on ", values.device().str(),
      ": this program has no kernels for such a device; for CUDA link "
      "//device_ops/cuda");
}

// out: [rows, numel], values and scales: [rows, terms, ...].
void CallDequantize(const at::Tensor& out, const at::Tensor& values,
                    const at::Tensor& scales, int64_t block, SumUse use) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("libtorch_fsdp::dequantize_blocks_", "")
          .typed<void(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      int64_t, double, bool)>();
  op.call(out, values, scales, block, use.factor, use.accumulate);
}

TORCH_LIBRARY_FRAGMENT(libtorch_fsdp, m) {
  m.def(
      "quantize_blocks_(Tensor input, int block, Tensor(a!) values, "
      "Tensor(b!) scales) -> ()");
  m.def(
      "dequantize_blocks_(Tensor(a!) out, Tensor values, Tensor scales, "
      "int block, float factor, bool accumulate) -> ()");
}

// Operators that fsdp::DeferredInit records are first tried without memory.
TORCH_LIBRARY_IMPL(libtorch_fsdp, Meta, m) {
  m.impl("quantize_blocks_", [](const at::Tensor&, int64_t, const at::Tensor&,
                                const at::Tensor&) {});
}

}  // namespace

int64_t NumBlocks(int64_t numel, int64_t block) {
  return numel / block + (numel % block == 0 ? 0 : 1);
}

void Quantize(const at::Tensor& in, int64_t block, const at::Tensor& values,
              const at::Tensor& scales) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("libtorch_fsdp::quantize_blocks_", "")
          .typed<void(const at::Tensor&, int64_t, const at::Tensor&,
                      const at::Tensor&)>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Rows rows(in, values, scales, block);
  FSDP_CHECK(rows.values.size(0) == rows.numbers.size(0));
  CheckHasKernel(op, values);
  op.call(rows.numbers, block, rows.values, rows.scales);
}

void Dequantize(const at::Tensor& out, const at::Tensor& values,
                const at::Tensor& scales, int64_t block) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Rows rows(out, values, scales, block);
  FSDP_CHECK(rows.values.size(0) == rows.numbers.size(0));
  CallDequantize(rows.numbers, rows.values.unsqueeze(1),
                 rows.scales.unsqueeze(1), block, {});
}

void DequantizeSum(const at::Tensor& out, const at::Tensor& values,
                   const at::Tensor& scales, int64_t block, SumUse use) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  FSDP_CHECK(out.dim() == 1);
  const Rows rows(out, values, scales, block);
  FSDP_CHECK(rows.values.size(0) > 0);
  CallDequantize(rows.numbers, rows.values.unsqueeze(0),
                 rows.scales.unsqueeze(0), block, use);
}

}  // namespace fsdp::device_ops
