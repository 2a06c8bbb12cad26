#include "device_ops/block_quantization.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/parallel_for.h"
#include "device_ops/row_layout.h"
#include "device_ops/vector_loop.h"

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

// --- On the CPU

// Up to this many elements one thread does all.
constexpr int64_t kGrain = 64 << 10;
constexpr float kLargestValue = 127;
constexpr uint32_t kInfinity = 0x7f800000;

// The bits of absolute values are ordered as the values, NaN above all.
template <typename In>
uint32_t LargestBits(const In* in, int64_t numel) {
  int32_t largest = 0;
  RunVectorised([=, &largest]() FSDP_VECTOR_LOOP {
    int32_t most = 0;
    for (int64_t i = 0; i < numel; ++i) {
      const auto bits =
          static_cast<int32_t>(BitsOf(ToFloat(in[i])) & 0x7fffffff);
      most = bits > most ? bits : most;
    }
    largest = most;
  });
  return static_cast<uint32_t>(largest);
}

template <typename In>
void RoundToValues(const In* in, int64_t numel, float scale, int8_t* values) {
  // This number has no bit behind the point, so that adding it rounds to even.
  constexpr float kRound = 3 << 22;
  const auto zero = static_cast<int32_t>(BitsOf(kRound));
  RunVectorised([=]() FSDP_VECTOR_LOOP {
    for (int64_t i = 0; i < numel; ++i) {
      const float value = ToFloat(in[i]) / scale;
      const float below = value < kLargestValue ? value : kLargestValue;
      const float bounded = below > -kLargestValue ? below : -kLargestValue;
      values[i] = static_cast<int8_t>(
          static_cast<int32_t>(BitsOf(bounded + kRound)) - zero);
    }
  });
}

template <typename In>
void QuantizeBlock(const In* in, int64_t numel, int8_t* values, float* scale) {
  const uint32_t largest = LargestBits(in, numel);
  *scale = largest < kInfinity ? FloatOf(largest) / kLargestValue
                               : std::numeric_limits<float>::quiet_NaN();
  if (*scale > 0) {
    RoundToValues(in, numel, *scale, values);
  } else {
    std::memset(values, 0, numel);
  }
}

// Calls fn(row, block index, first element, elements) for all blocks.
template <typename Fn>
void ForEachBlock(int64_t rows, int64_t numel, int64_t block, const Fn& fn) {
  const int64_t blocks = NumBlocks(numel, block);
  ParallelFor(rows * blocks, std::max<int64_t>(1, kGrain / block),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  const int64_t first = i % blocks * block;
                  fn(i / blocks, i % blocks, first,
                     std::min(block, numel - first));
                }
              });
}

void QuantizeOnCpu(const at::Tensor& in, int64_t block,
                   const at::Tensor& values, const at::Tensor& scales) {
  const BlockRows rows = RowsOf(in, values, scales, block);
  auto* const value_data = values.mutable_data_ptr<int8_t>();
  auto* const scale_data = scales.mutable_data_ptr<float>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, in.scalar_type(), "quantize_blocks_", [&] {
        const auto* const in_data = in.const_data_ptr<scalar_t>();
        ForEachBlock(
            rows.rows, rows.numel, block,
            [&](int64_t row, int64_t index, int64_t first, int64_t numel) {
              QuantizeBlock(in_data + row * rows.number_stride + first, numel,
                            value_data + row * rows.value_row_stride + first,
                            scale_data + row * rows.scale_row_stride + index);
            });
      });
}

// The terms of one block, or of a part of it.
struct Terms {
  const int8_t* values;
  const float* scales;
  int64_t count;
  int64_t value_stride;
  int64_t scale_stride;
};

void SumTerms(const Terms& terms, int64_t numel, float* sums) {
  for (int64_t term = 0; term < terms.count; ++term) {
    const int8_t* const values = terms.values + term * terms.value_stride;
    const float scale = terms.scales[term * terms.scale_stride];
    const bool is_first = term == 0;
    RunVectorised([=]() FSDP_VECTOR_LOOP {
      if (is_first) {
        for (int64_t i = 0; i < numel; ++i) {
          sums[i] = static_cast<float>(values[i]) * scale;
        }
      } else {
        for (int64_t i = 0; i < numel; ++i) {
          sums[i] += static_cast<float>(values[i]) * scale;
        }
      }
    });
  }
}

template <typename Out>
void DequantizeBlock(Terms terms, int64_t numel, const SumUse& use, Out* out) {
  constexpr int64_t kTile = 1024;  // stays in the first-level cache
  float sums[kTile];
  for (int64_t begin = 0; begin < numel; begin += kTile) {
    const int64_t size = std::min(kTile, numel - begin);
    SumTerms(terms, size, sums);
    const auto scale = use.accumulate ? ScaleLoop<true, float, Out>
                                      : ScaleLoop<false, float, Out>;
    scale(sums, size, use.factor, out + begin);
    terms.values += size;
  }
}

void DequantizeOnCpu(const at::Tensor& out, const at::Tensor& values,
                     const at::Tensor& scales, int64_t block, double factor,
                     bool accumulate) {
  const BlockRows rows = RowsOf(out, values, scales, block);
  const auto* const value_data = values.const_data_ptr<int8_t>();
  const auto* const scale_data = scales.const_data_ptr<float>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "dequantize_blocks_", [&] {
        auto* const out_data = out.mutable_data_ptr<scalar_t>();
        ForEachBlock(
            rows.rows, rows.numel, block,
            [&](int64_t row, int64_t index, int64_t first, int64_t numel) {
              const Terms terms = {
                  value_data + row * rows.value_row_stride + first,
                  scale_data + row * rows.scale_row_stride + index, rows.terms,
                  rows.value_term_stride, rows.scale_term_stride};
              DequantizeBlock(terms, numel, {factor, accumulate},
                              out_data + row * rows.number_stride + first);
            });
      });
}

// out: [rows, numel], values and scales: [rows, terms, ...].
void CallDequantize(const at::Tensor& out, const at::Tensor& values,
                    const at::Tensor& scales, int64_t block, SumUse use) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("libtorch_fsdp::dequantize_blocks_", "")
          .typed<decltype(DequantizeOnCpu)>();
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

TORCH_LIBRARY_IMPL(libtorch_fsdp, CPU, m) {
  m.impl("quantize_blocks_", &QuantizeOnCpu);
  m.impl("dequantize_blocks_", &DequantizeOnCpu);
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
          .typed<decltype(QuantizeOnCpu)>();
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
