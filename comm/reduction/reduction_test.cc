#include "comm/reduction/reduction.h"

#include <cmath>
#include <limits>
#include <random>
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

using Vectors = std::vector<std::vector<float>>;

Vectors RandomVectors(int count, int64_t size) {
  std::mt19937 random(static_cast<unsigned>(int64_t{1000} * count + size));
  std::normal_distribution<float> normal;
  Vectors vectors(count, std::vector<float>(size));
  for (std::vector<float>& vector : vectors) {
    for (float& value : vector) value = normal(random);
  }
  return vectors;
}

std::vector<const float*> PointersTo(const Vectors& vectors) {
  std::vector<const float*> pointers;
  for (const auto& vector : vectors) pointers.push_back(vector.data());
  return pointers;
}

TEST(FloatSumTest, HasTheBitsOfAddingOneAfterTheOther) {
  for (int num_inputs : {1, 2, 3, 5, 8}) {
    for (int64_t size : {0, 1, 7, 31, 32, 33, 64, 1021}) {
      const Vectors inputs = RandomVectors(num_inputs, size);
      for (float scale : {1.0f, 0.5f, 1 / 3.0f}) {
        for (bool accumulate : {false, true}) {
          std::vector<float> out(size, 0.1f);
          SumFloats(PointersTo(inputs), size, scale, accumulate,
                    Stores::kCached, out.data());
          for (int64_t i = 0; i < size; ++i) {
            volatile float sum = inputs[0][i];
            for (int k = 1; k < num_inputs; ++k) sum = sum + inputs[k][i];
            sum = sum * scale;
            if (accumulate) sum = 0.1f + sum;
            ASSERT_EQ(out[i], sum) << num_inputs << " x " << size;
          }
        }
      }
    }
  }
}

// Begins everywhere in a vector.
TEST(FloatSumTest, HasTheSameBitsPastTheCaches) {
  for (int64_t size : {0, 1, 5, 8, 31, 39, 40, 41, 1021}) {
    const Vectors inputs = RandomVectors(3, size);
    for (bool accumulate : {false, true}) {
      std::vector<float> expected(size, 0.1f);
      SumFloats(PointersTo(inputs), size, 0.3f, accumulate, Stores::kCached,
                expected.data());
      for (int64_t begin = 0; begin < 9; ++begin) {
        std::vector<float> out(begin + size + 9, 0.1f);
        SumFloats(PointersTo(inputs), size, 0.3f, accumulate,
                  Stores::kPastCaches, out.data() + begin);
        for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
          const bool is_sum = i >= begin && i < begin + size;
          ASSERT_EQ(out[i], is_sum ? expected[i - begin] : 0.1f)
              << size << " from " << begin << " on, at " << i;
        }
      }
    }
  }
}

TEST(FloatSumTest, AnInputMayBeTheOutput) {
  for (int which : {0, 1}) {
    Vectors inputs = RandomVectors(2, 101);
    const Vectors before = inputs;
    SumFloats(PointersTo(inputs), 101, 1, false, Stores::kCached,
              inputs[which].data());
    for (int i = 0; i < 101; ++i) {
      EXPECT_EQ(inputs[which][i], before[0][i] + before[1][i]);
    }
  }
}

}  // namespace
}  // namespace fsdp::comm
