// The tests of OperatorsTest.
#include <ATen/ops/full.h>

#include <limits>
#include <vector>

#include "device_ops/block_quantization.h"
#include "device_ops/pack.h"
#include "device_ops/testing/operator_cases.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops::testing {
namespace {

c10::Device Device() { return OperatorsTest::GetParam().device; }

at::Tensor OnDevice(const at::Tensor& tensor) { return tensor.to(Device()); }

std::vector<at::Tensor> OnDevice(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> moved;
  moved.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) moved.push_back(OnDevice(tensor));
  return moved;
}

void ExpectSamePacks(const PackCase& test, at::ScalarType dtype) {
  const std::vector<at::Tensor> sources = OnDevice(test.sources);
  for (double scale : kScales) {
    const at::Tensor expected = RandomNumbers(dtype, test.out_size, 7);
    const at::Tensor out = OnDevice(expected);
    Pack(expected, test.sources, test.packing, scale);
    Pack(out, sources, test.packing, scale);
    EXPECT_EQ(Difference(out.cpu(), expected), "") << dtype << " " << scale;
    Pack(expected, test.sources, test.packing, scale, /*accumulate=*/true);
    Pack(out, sources, test.packing, scale, /*accumulate=*/true);
    EXPECT_EQ(Difference(out.cpu(), expected), "")
        << dtype << " added, " << scale;
  }
}

TEST_P(OperatorsTest, PackHasTheBitsOfTheCpu) {
  for (int64_t size : kSizes) {
    if (size > GetParam().max_numel) continue;
    const PackCase test = MakePackCase(size, size < 1000 ? 5 : 61);
    for (at::ScalarType dtype : kDtypes) {
      SCOPED_TRACE(size);
      ExpectSamePacks(test, dtype);
    }
  }
}

// Together with the ranges between them there are 96, 97, 1024, 1026, 1120 and
// more: as many as a short launch takes, a long one, and one of each.
TEST_P(OperatorsTest, PacksAnyNumberOfPieces) {
  for (int pieces : {60, 61, 640, 641, 700, 3000}) {
    SCOPED_TRACE(pieces);
    ExpectSamePacks(MakePackCase(20'011, pieces), at::kBFloat16);
  }
}

// Whatever the alignment of the two sides, nothing else is written.
TEST_P(OperatorsTest, PackTouchesNothingElse) {
  constexpr int64_t kSize = 20'011;
  for (at::ScalarType dtype : kDtypes) {
    const at::Tensor source = RandomNumbers(at::kHalf, kSize, 1);
    for (int64_t from = 0; from < 9; ++from) {
      for (int64_t to = 1; to < 9; ++to) {
        Packing packing;
        packing.AddPiece(0, from, to, kSize - 9);
        const at::Tensor expected = at::full({kSize}, 77, dtype);
        const at::Tensor out = OnDevice(expected);
        Pack(expected, {source}, packing, 0.3);
        Pack(out, {OnDevice(source)}, packing, 0.3);
        EXPECT_EQ(Difference(out.cpu(), expected), "")
            << dtype << " " << from << " " << to;
      }
    }
  }
}

TEST_P(OperatorsTest, ScalingHasTheBitsOfTheCpu) {
  for (int64_t size : kSizes) {
    if (size > GetParam().max_numel) continue;
    for (at::ScalarType from : kDtypes) {
      const at::Tensor in = RandomNumbers(from, size, 3);
      for (at::ScalarType to : kDtypes) {
        for (double scale : kScales) {
          const at::Tensor expected = at::full({size}, 77, to);
          const at::Tensor out = OnDevice(expected);
          CopyScaled(expected, in, scale);
          CopyScaled(out, OnDevice(in), scale);
          EXPECT_EQ(Difference(out.cpu(), expected), "")
              << from << " to " << to << " " << size << " " << scale;
        }
        const at::Tensor expected = RandomNumbers(to, size, 4);
        const at::Tensor out = OnDevice(expected);
        // For one dtype LibTorch's kernel runs, whose CPU code rounds the
        // product to a half at the ends of its vectors.
        const double scale = from == to ? 1 : 2;
        CopyScaled(expected, in, scale, /*accumulate=*/true);
        CopyScaled(out, OnDevice(in), scale, /*accumulate=*/true);
        EXPECT_EQ(Difference(out.cpu(), expected), "")
            << from << " added to " << to << " " << size;
      }
    }
  }
}

struct Quantized {
  at::Tensor values;
  at::Tensor scales;
};

// Returns rows that lie `gap` elements apart.
Quantized EmptyRows(int64_t rows, int64_t size, int64_t block, int64_t gap,
                    at::Device device) {
  const at::TensorOptions options(device);
  const int64_t blocks = NumBlocks(size, block);
  return {at::full({rows, size + gap}, 99, options.dtype(at::kChar))
              .narrow(1, 0, size),
          at::full({rows, blocks + gap}, 99, options.dtype(at::kFloat))
              .narrow(1, 0, blocks)};
}

void ExpectSameQuantization(const at::Tensor& in, int64_t block, int64_t gap) {
  const int64_t rows = in.size(0);
  const int64_t size = in.size(1);
  const Quantized expected = EmptyRows(rows, size, block, gap, at::kCPU);
  const Quantized actual = EmptyRows(rows, size, block, gap, Device());
  Quantize(in, block, expected.values, expected.scales);
  Quantize(OnDevice(in), block, actual.values, actual.scales);
  EXPECT_EQ(Difference(actual.values.cpu(), expected.values), "");
  EXPECT_EQ(Difference(actual.scales.cpu(), expected.scales), "");
  const at::Tensor rows_out = at::full({rows, size}, 55, in.options());
  const at::Tensor rows_on_device = OnDevice(rows_out);
  Dequantize(rows_out, expected.values, expected.scales, block);
  Dequantize(rows_on_device, actual.values, actual.scales, block);
  EXPECT_EQ(Difference(rows_on_device.cpu(), rows_out), "");
  for (const SumUse& use : {SumUse{}, SumUse{1.0 / 3, true}}) {
    const at::Tensor sum = RandomNumbers(in.scalar_type(), size, 8);
    const at::Tensor sum_on_device = OnDevice(sum);
    DequantizeSum(sum, expected.values, expected.scales, block, use);
    DequantizeSum(sum_on_device, actual.values, actual.scales, block, use);
    EXPECT_EQ(Difference(sum_on_device.cpu(), sum), "") << use.factor;
  }
}

// A number that is not finite makes its block NaN.
TEST_P(OperatorsTest, QuantizationHasTheBitsOfTheCpu) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kBad[] = {kInfinity, -kInfinity,
                            std::numeric_limits<float>::quiet_NaN()};
  for (int64_t size : kSizes) {
    for (at::ScalarType dtype : kDtypes) {
      const at::Tensor in = RandomNumbers(dtype, 3 * size, 5).view({3, size});
      if (size > 0) in[1][size / 2] = kBad[size % 3];
      for (int64_t block : {1, 3, 64, 256, 2048}) {
        for (int64_t gap : {0, 5, 16}) {
          if (3 * NumBlocks(size, block) > GetParam().max_blocks) continue;
          SCOPED_TRACE(::testing::Message()
                       << dtype << " " << size << " " << block << " " << gap);
          ExpectSameQuantization(in, block, gap);
        }
      }
    }
  }
}

TEST_P(OperatorsTest, FusedLayersRoundOnce) {
  for (at::ScalarType dtype : kDtypes) {
    ExpectRotationsRoundOnce(Device(), dtype);
    ExpectSwiGlusRoundOnce(Device(), dtype);
    ExpectCrossEntropiesRoundOnce(Device(), dtype);
  }
}

}  // namespace
}  // namespace fsdp::device_ops::testing
