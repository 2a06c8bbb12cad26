#include "device_ops/block_quantization.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/tensor_over.h"
#include "device_ops/testing/operator_cases.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops {
namespace {

using testing::Difference;
using ::testing::HasSubstr;
using testing::kDtypes;
using testing::kSizes;
using testing::RandomNumbers;

constexpr int64_t kBlocks[] = {1, 3, 64, 256, 2048};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Quantized {
  at::Tensor values;
  at::Tensor scales;
};

Quantized Empty(int64_t size, int64_t block) {
  return {at::full({size}, 99, at::TensorOptions().dtype(at::kChar)),
          at::full({NumBlocks(size, block)}, 99.0)};
}

Quantized QuantizeAll(const at::Tensor& in, int64_t block) {
  Quantized result = Empty(in.numel(), block);
  Quantize(in, block, result.values, result.scales);
  return result;
}

at::Tensor ScalePerNumber(const at::Tensor& scales, int64_t block,
                          int64_t size) {
  return scales.repeat_interleave(block).narrow(0, 0, size);
}

// Quantises number by number.
Quantized Reference(const at::Tensor& in, int64_t block) {
  Quantized result = Empty(in.numel(), block);
  const at::Tensor numbers = in.to(at::kFloat).contiguous();
  const float* const data = numbers.const_data_ptr<float>();
  int8_t* const values = result.values.mutable_data_ptr<int8_t>();
  float* const scales = result.scales.mutable_data_ptr<float>();
  for (int64_t begin = 0; begin < in.numel(); begin += block) {
    const int64_t end = std::min(begin + block, in.numel());
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      const float absolute = std::fabs(data[i]);
      largest = std::isfinite(absolute) ? std::max(largest, absolute) : kNan;
      if (std::isnan(largest)) break;
    }
    const float scale = largest / 127;
    scales[begin / block] = scale;
    for (int64_t i = begin; i < end; ++i) {
      const float value = scale > 0 ? std::nearbyint(data[i] / scale) : 0.0f;
      values[i] = static_cast<int8_t>(std::clamp(value, -127.0f, 127.0f));
    }
  }
  return result;
}

TEST(QuantizeTest, EqualsTheReferenceForAllSizesBlocksAndDtypes) {
  for (int64_t size : kSizes) {
    for (at::ScalarType dtype : kDtypes) {
      const at::Tensor in = RandomNumbers(dtype, size, 1);
      for (int64_t block : kBlocks) {
        const Quantized actual = QuantizeAll(in, block);
        const Quantized expected = Reference(in, block);
        EXPECT_EQ(Difference(actual.values, expected.values), "")
            << dtype << " " << size << " " << block;
        EXPECT_EQ(Difference(actual.scales, expected.scales), "")
            << dtype << " " << size << " " << block;
      }
    }
  }
}

TEST(QuantizeTest, AnErrorIsAtMostHalfAScale) {
  constexpr int64_t kSize = 10'007;
  constexpr int64_t kBlock = 256;
  const at::Tensor in = RandomNumbers(at::kFloat, kSize, 2);
  const Quantized quantized = QuantizeAll(in, kBlock);
  const at::Tensor out = at::empty({kSize});
  Dequantize(out, quantized.values, quantized.scales, kBlock);
  const at::Tensor allowed = ScalePerNumber(quantized.scales, kBlock, kSize);
  EXPECT_TRUE(out.sub(in).abs().le(allowed.mul(0.5001)).all().item<bool>());
}

TEST(QuantizeTest, TiesGoToTheEvenValue) {
  const at::Tensor in = at::tensor({127.0, 0.5, 1.5, 2.5, -0.5, -3.5});
  EXPECT_TRUE(at::equal(QuantizeAll(in, 6).values,
                        at::tensor({127, 0, 2, 2, 0, -4}, at::kChar)));
}

TEST(QuantizeTest, WhatIsNotFiniteMakesItsBlockNan) {
  for (at::ScalarType dtype : kDtypes) {
    for (float bad : {kNan, kInfinity, -kInfinity}) {
      const at::Tensor in = RandomNumbers(dtype, 30, 3);
      in[12] = bad;
      const Quantized quantized = QuantizeAll(in, 10);
      const at::Tensor out = at::zeros({30}, in.options());
      Dequantize(out, quantized.values, quantized.scales, 10);
      const at::Tensor numbers = at::arange(30);
      EXPECT_TRUE(
          at::equal(out.isnan(), numbers.ge(10).logical_and(numbers.lt(20))))
          << dtype << " " << bad;
    }
  }
  const at::Tensor too_large = at::full({3}, 1e300, at::kDouble);
  EXPECT_TRUE(std::isnan(QuantizeAll(too_large, 4).scales[0].item<float>()));
}

TEST(QuantizeTest, TheSmallestNumbersStayInBounds) {
  for (float number : {1e-45f, 1e-43f, 2.6e-43f, 1e-40f, 1e-38f, 1e-36f}) {
    const at::Tensor in = at::full({9}, -number);
    const Quantized quantized = QuantizeAll(in, 4);
    const at::Tensor out = at::empty({9});
    Dequantize(out, quantized.values, quantized.scales, 4);
    EXPECT_LE(out.max().item<float>(), 0);
    EXPECT_GE(out.min().item<float>(), -1.01f * number);
  }
}

TEST(QuantizeTest, ABlockMayBeLargerThanAnyTensor) {
  EXPECT_EQ(NumBlocks(0, kMaxBlock), 0);
  EXPECT_EQ(NumBlocks(1021, kMaxBlock), 1);
  const at::Tensor in = RandomNumbers(at::kFloat, 1021, 7);
  const Quantized quantized = QuantizeAll(in, kMaxBlock);
  const Quantized expected = QuantizeAll(in, 1021);
  EXPECT_EQ(Difference(quantized.values, expected.values), "");
  EXPECT_EQ(Difference(quantized.scales, expected.scales), "");
}

// Returns memory of a device that this program knows by name alone.
at::Tensor RowOn(c10::Device device, int64_t size, at::ScalarType dtype) {
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      size * static_cast<int64_t>(c10::elementSize(dtype)),
      at::DataPtr(nullptr, device));
  return TensorOver(storage, 0, {1, size}, {size, 1}, dtype);
}

TEST(QuantizeTest, ADeviceWithoutKernelsIsNamed) {
  const c10::Device device(c10::kXPU, 0);
  try {
    Quantize(RowOn(device, 8, at::kFloat), 8, RowOn(device, 8, at::kChar),
             RowOn(device, 1, at::kFloat));
    ADD_FAILURE() << "was done";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("int8 blocks on xpu:0: this program has no kernels"));
  }
}

// Returns rows of `whole`, which has more columns: messages have such memory.
at::Tensor Columns(const at::Tensor& whole, int64_t rows, int64_t columns) {
  return whole.narrow(0, 0, rows).narrow(1, 0, columns);
}

TEST(QuantizeTest, RowsHaveBlocksOfTheirOwnAndMayLieApart) {
  constexpr int64_t kRows = 3;
  constexpr int64_t kBlock = 8;
  for (int64_t size : {0, 1, 13, 1021}) {
    for (at::ScalarType dtype : kDtypes) {
      const int64_t blocks = NumBlocks(size, kBlock);
      const at::Tensor in = Columns(
          RandomNumbers(dtype, kRows * (size + 3), 4).view({kRows, size + 3}),
          kRows, size);
      const at::Tensor values =
          Columns(at::full({kRows, size + 5}, 99, at::kChar), kRows, size);
      const at::Tensor scales =
          Columns(at::full({kRows, blocks + 1}, 99.0), kRows, blocks);
      Quantize(in, kBlock, values, scales);
      const at::Tensor out =
          Columns(at::full({kRows, size + 7}, 55, dtype), kRows, size);
      Dequantize(out, values, scales, kBlock);
      for (int64_t row = 0; row < kRows; ++row) {
        const Quantized expected = Reference(in[row], kBlock);
        EXPECT_EQ(Difference(values[row], expected.values), "");
        EXPECT_EQ(Difference(scales[row], expected.scales), "");
        const at::Tensor plain = at::empty({size}, out.options());
        Dequantize(plain, expected.values, expected.scales, kBlock);
        EXPECT_EQ(Difference(out[row], plain), "");
      }
    }
  }
}

// Each operator of LibTorch rounds its result.
at::Tensor ReferenceSum(const at::Tensor& values, const at::Tensor& scales,
                        int64_t block, const at::Tensor& out, SumUse use) {
  const at::ScalarType dtype =
      out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor sum;
  for (int64_t row = 0; row < values.size(0); ++row) {
    const at::Tensor term =
        values[row]
            .to(at::kFloat)
            .mul(ScalePerNumber(scales[row], block, out.numel()));
    sum = row == 0 ? term : sum.add(term);
  }
  const at::Tensor used = sum.to(dtype).mul(use.factor);
  return (use.accumulate ? out.to(dtype).add(used) : used)
      .to(out.scalar_type());
}

TEST(DequantizeSumTest, AddsRanksInOrder) {
  constexpr int64_t kBlock = 32;
  for (int64_t ranks : {1, 2, 3, 5}) {
    for (int64_t size : {0, 1, 31, 257, 1021}) {
      const at::Tensor in =
          RandomNumbers(at::kFloat, ranks * size, 5).view({ranks, size});
      const at::Tensor values = at::empty({ranks, size}, at::kChar);
      const at::Tensor scales = at::empty({ranks, NumBlocks(size, kBlock)});
      Quantize(in, kBlock, values, scales);
      for (at::ScalarType dtype : kDtypes) {
        for (const SumUse& use :
             {SumUse{}, SumUse{0.5, false}, SumUse{1.0 / 3, true}}) {
          const at::Tensor out = RandomNumbers(dtype, size, 6);
          const at::Tensor expected =
              ReferenceSum(values, scales, kBlock, out, use);
          DequantizeSum(out, values, scales, kBlock, use);
          EXPECT_EQ(Difference(out, expected), "")
              << dtype << " " << ranks << " " << size << " " << use.factor;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::device_ops
