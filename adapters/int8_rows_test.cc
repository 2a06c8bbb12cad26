// Held against the format and its bound, computed by LibTorch's own operators.
#include "adapters/int8_rows.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace fsdp::adapters {
namespace {

at::Tensor Random(int64_t rows, int64_t numel,
                  c10::ScalarType dtype = at::kFloat) {
  at::manual_seed(3);
  return at::randn({rows, numel}).mul_(0.02).to(dtype);
}

// The largest absolute value of its block, for each number.
at::Tensor LargestOfBlock(const Int8Rows& layout, const at::Tensor& rows) {
  at::Tensor largest = at::zeros(rows.sizes(), at::kDouble);
  for (int64_t begin = 0; begin < layout.numel; begin += layout.block) {
    const int64_t end = std::min(begin + layout.block, layout.numel);
    largest.slice(1, begin, end)
        .copy_(rows.slice(1, begin, end).abs().amax(1, /*keepdim=*/true));
  }
  return largest;
}

// The format of files: checkpoints have it.
TEST(Int8RowsTest, ARowIsNumbersPaddingAndScales) {
  const Int8Rows layout{5, 2};
  EXPECT_EQ(layout.row_bytes(), 5 + 3 + 3 * 4);
  const at::Tensor packed =
      Pack(layout, at::arange(-5, 5, at::kFloat).view({2, 5}));
  ASSERT_EQ(packed.scalar_type(), at::kByte);
  ASSERT_EQ(packed.sizes(), (std::vector<int64_t>{2, 20}));
  const auto* const bytes =
      reinterpret_cast<const int8_t*>(packed.const_data_ptr<uint8_t>()) + 20;
  // 0, 1 | 2, 3 | 4.
  const std::vector<int8_t> expected = {0, 127, 85, 127, 127, 0, 0, 0};
  EXPECT_EQ(std::vector<int8_t>(bytes, bytes + 8), expected);
  const std::vector<float> scales = {1.0f / 127, 3.0f / 127, 4.0f / 127};
  EXPECT_EQ(std::memcmp(bytes + 8, scales.data(), 12), 0);
}

// Two layouts of one row length would read each other's bytes.
TEST(Int8RowsTest, RowsOfOneLengthHaveOneLayout) {
  for (const int64_t numel : {1, 7, 64, 96, 97}) {
    std::map<int64_t, int64_t> block_of;  // by the length
    for (int64_t most = 1; most <= numel + 3; ++most) {
      const Int8Rows layout = Int8Rows::Of(numel, most);
      EXPECT_LE(layout.block, most);
      EXPECT_EQ((numel + layout.block - 1) / layout.block,
                (numel + most - 1) / most);
      const auto [it, is_new] =
          block_of.try_emplace(layout.row_bytes(), layout.block);
      EXPECT_EQ(it->second, layout.block) << numel << ", " << most;
    }
  }
  EXPECT_EQ(Int8Rows::Of(96, 64).block, 48);
  EXPECT_EQ(Int8Rows::Of(128, 64).block, 64);
}

TEST(Int8RowsTest, NoNumberIsOffByMoreThanHalfAScale) {
  for (const int64_t numel : {1, 3, 63, 64, 65, 130}) {
    for (const int64_t block : {1, 7, 64, 256}) {
      const Int8Rows layout{numel, block};
      const at::Tensor rows = Random(9, numel);
      const at::Tensor off = (Unpack(layout, Pack(layout, rows), at::kDouble) -
                              rows.to(at::kDouble))
                                 .abs();
      // The scale is rounded itself.
      EXPECT_TRUE(off.le(LargestOfBlock(layout, rows) * (1.0 / 254 + 1e-6))
                      .all()
                      .item<bool>())
          << numel << " in blocks of " << block;
    }
  }
}

// Of an error that is uniform within half a scale the mean square is
// scale^2 / 12; the largest number of each block has none.
TEST(Int8RowsTest, TheErrorOfNormalNumbersIsWhatItShouldBe) {
  constexpr int64_t kNumel = 4096;
  const at::Tensor rows = Random(64, kNumel).to(at::kDouble);
  double before = 0;
  for (const int64_t block : {32, 64, 128, 256}) {
    const Int8Rows layout{kNumel, block};
    const at::Tensor scale = LargestOfBlock(layout, rows) / 127;
    const double expected =
        std::sqrt((scale.square() / 12).sum().item<double>() *
                  (1 - 1.0 / static_cast<double>(block)) /
                  rows.square().sum().item<double>());
    const double actual =
        (Unpack(layout, Pack(layout, rows), at::kDouble) - rows)
            .norm()
            .item<double>() /
        rows.norm().item<double>();
    EXPECT_NEAR(actual / expected, 1, 0.01) << block;
    EXPECT_GT(actual, before) << block;
    EXPECT_LT(actual, 0.0075) << block;
    before = actual;
  }
}

TEST(Int8RowsTest, RowsAreWholeByThemselves) {
  const Int8Rows layout{37, 16};
  const at::Tensor rows = Random(6, 37);
  const at::Tensor all = Pack(layout, rows);
  EXPECT_TRUE(at::equal(Pack(layout, rows.slice(0, 2, 5)), all.slice(0, 2, 5)));
  EXPECT_TRUE(at::equal(Unpack(layout, all.slice(0, 2, 5), at::kFloat),
                        Unpack(layout, all, at::kFloat).slice(0, 2, 5)));
}

TEST(Int8RowsTest, AnyFloatingPointIsPackedAndRoundsOnce) {
  const Int8Rows layout{20, 8};
  for (const c10::ScalarType dtype :
       {at::kDouble, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn}) {
    const at::Tensor rows = Random(3, 20, dtype);
    EXPECT_TRUE(
        at::equal(Pack(layout, rows), Pack(layout, rows.to(at::kFloat))))
        << dtype;
  }
  const at::Tensor packed = Pack(layout, Random(3, 20));
  EXPECT_TRUE(at::equal(Unpack(layout, packed, at::kBFloat16),
                        Unpack(layout, packed, at::kFloat).to(at::kBFloat16)));
  const at::Tensor strided = Random(20, 3).t();
  EXPECT_TRUE(
      at::equal(Pack(layout, strided), Pack(layout, strided.contiguous())));
}

TEST(Int8RowsTest, ZerosStayZeroAndWhatIsNotFiniteIsSeen) {
  const Int8Rows layout{6, 4};
  EXPECT_TRUE(
      at::equal(Unpack(layout, Pack(layout, at::zeros({2, 6})), at::kFloat),
                at::zeros({2, 6})));
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()}) {
    at::Tensor rows = at::full({2, 6}, 0.5);
    rows[1][5] = bad;
    const at::Tensor scales = ScalesOf(layout, Pack(layout, rows));
    EXPECT_EQ(scales.isnan().sum().item<int64_t>(), 1);
    EXPECT_TRUE(std::isnan(scales[1][1].item<float>()));
  }
}

}  // namespace
}  // namespace fsdp::adapters
