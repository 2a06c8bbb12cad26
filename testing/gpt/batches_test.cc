#include "testing/gpt/batches.h"

#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::testing::ElementsAre;

std::vector<int64_t> Values(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  const int64_t* data = dense.const_data_ptr<int64_t>();
  return std::vector<int64_t>(data, data + dense.numel());
}

// Python gives these for ranks 0 and 1:
//   g = torch.Generator().manual_seed(1234 + rank)
//   torch.randint(0, 256, (2, 4), generator=g)[:, 0]  # twice
TEST(BatchesTest, AreTheStreamOfThePeer) {
  Batches rank0(256, {2, 3}, {0, 2});
  const Batch first = rank0.Of(0);
  EXPECT_THAT(Values(first.inputs), ElementsAre(47, 48, 49, 204, 205, 206));
  EXPECT_THAT(Values(first.targets), ElementsAre(48, 49, 50, 205, 206, 207));
  EXPECT_THAT(Values(rank0.Of(1).inputs),
              ElementsAre(143, 144, 145, 154, 155, 156));
  Batches rank1(256, {2, 3}, {1, 2});
  EXPECT_THAT(Values(rank1.Of(0).inputs),
              ElementsAre(203, 204, 205, 195, 196, 197));
  // Tokens are modulo the vocabulary.
  const Batch small = Batches(/*vocab=*/3, {1, 5}, {}).Of(0);
  const std::vector<int64_t> inputs = Values(small.inputs);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(inputs[i + 1], (inputs[i] + 1) % 3);
  EXPECT_EQ(Values(small.targets)[4], (inputs[4] + 1) % 3);
}

// Part 1 comes late, goes away and is taken up again.
TEST(BatchesTest, AreThoseOfTheStepAndPart) {
  Batches batches(256, {2, 3}, {/*rank=*/1, /*ranks=*/2});
  for (const auto& [step, part] :
       {std::pair(0, 0), {1, 0}, {7, 1}, {8, 1}, {9, 0}, {10, 1}}) {
    Batches alone(256, {2, 3}, {/*rank=*/2 * part + 1, /*ranks=*/4});
    Batch expected;
    for (int before = 0; before <= step; ++before) expected = alone.Of(before);
    EXPECT_TRUE(batches.Of(step, part).inputs.equal(expected.inputs)) << step;
  }
}

}  // namespace
}  // namespace gpt
