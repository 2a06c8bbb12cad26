#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "comm/reduction/reduction.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

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

// From everywhere in a vector on.
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

TEST(FloatSumTest, KeepsWhatIsNoNumber) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> a(40, kInfinity);
  std::vector<float> b(40, -kInfinity);
  const std::vector<const float*> inputs = {a.data(), b.data()};
  SumFloats(inputs, 40, 1, false, Stores::kCached, b.data());
  for (float value : b) EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace fsdp::comm
