#include "comm/reduction/reduction.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::ElementsAre;

template <typename T>
std::vector<T> ReduceVectors(at::ScalarType dtype, ReduceOp op,
                             const std::vector<std::vector<T>>& inputs) {
  std::vector<const void*> pointers;
  pointers.reserve(inputs.size());
  for (const auto& input : inputs) pointers.push_back(input.data());
  std::vector<T> out(inputs[0].size());
  Reduce(dtype, op, pointers, static_cast<int64_t>(out.size()), out.data());
  return out;
}

TEST(ReductionTest, EveryOperation) {
  const std::vector<std::vector<float>> inputs = {{1, -2}, {3, 4}, {-5, 6}};
  constexpr auto kFloat = at::ScalarType::Float;
  EXPECT_THAT(ReduceVectors(kFloat, ReduceOp::kSum, inputs),
              ElementsAre(-1, 8));
  EXPECT_THAT(ReduceVectors(kFloat, ReduceOp::kMin, inputs),
              ElementsAre(-5, -2));
  EXPECT_THAT(ReduceVectors(kFloat, ReduceOp::kMax, inputs), ElementsAre(3, 6));
}

TEST(ReductionTest, ManyBlocksAndOneInputAsTheOutput) {
  std::vector<double> a(10'007);
  std::vector<double> b(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<double>(i);
    b[i] = 0.5;
  }
  const std::vector<const void*> inputs = {a.data(), b.data()};
  Reduce(at::ScalarType::Double, ReduceOp::kSum, inputs,
         static_cast<int64_t>(a.size()), b.data());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(b[i], static_cast<double>(i) + 0.5);
  }
}

TEST(ReductionTest, HalvesAreSummedInFloat32AndRoundedOnce) {
  // In bfloat16 arithmetic 256 + 1 is 256, three times over.
  const std::vector<std::vector<c10::BFloat16>> bfloats = {
      {256.0f}, {1.0f}, {1.0f}, {1.0f}};
  EXPECT_EQ(static_cast<float>(ReduceVectors(at::ScalarType::BFloat16,
                                             ReduceOp::kSum, bfloats)[0]),
            260.0f);  // 259 is halfway to nothing that bfloat16 has: 258, 260
  const std::vector<std::vector<c10::Half>> halves = {
      {2048.0f}, {1.0f}, {1.0f}, {1.0f}};
  EXPECT_EQ(static_cast<float>(
                ReduceVectors(at::ScalarType::Half, ReduceOp::kSum, halves)[0]),
            2052.0f);
}

TEST(ReductionTest, IntegersWrap) {
  const std::vector<std::vector<int32_t>> ints = {
      {std::numeric_limits<int32_t>::max()}, {1}};
  EXPECT_THAT(ReduceVectors(at::ScalarType::Int, ReduceOp::kSum, ints),
              ElementsAre(std::numeric_limits<int32_t>::min()));
  const std::vector<std::vector<uint8_t>> bytes = {{200}, {100}};
  EXPECT_THAT(ReduceVectors(at::ScalarType::Byte, ReduceOp::kSum, bytes),
              ElementsAre(44));
}

TEST(ReductionTest, NanStaysNanInEveryPlace) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
    const std::vector<std::vector<float>> inputs = {
        {nan, 1, 1}, {1, nan, 1}, {1, 1, nan}};
    for (float value : ReduceVectors(at::ScalarType::Float, op, inputs)) {
      EXPECT_TRUE(std::isnan(value)) << ReduceOpName(op);
    }
  }
}

TEST(ReductionTest, NothingToReduce) {
  const std::vector<const void*> inputs = {nullptr, nullptr};
  Reduce(at::ScalarType::Long, ReduceOp::kMax, inputs, 0, nullptr);
}

}  // namespace
}  // namespace fsdp::comm
