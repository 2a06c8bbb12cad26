#include "testing/gpt/batches.h"

#include <ATen/ops/full.h>

#include <cstdint>
#include <memory>
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
TEST(CountDataTest, IsTheStreamOfThePeer) {
  CountData rank0(256, {2, 3}, /*rank=*/0);
  const Batch first = rank0.Next();
  EXPECT_THAT(Values(first.inputs), ElementsAre(47, 48, 49, 204, 205, 206));
  EXPECT_THAT(Values(first.targets), ElementsAre(48, 49, 50, 205, 206, 207));
  EXPECT_THAT(Values(rank0.Next().inputs),
              ElementsAre(143, 144, 145, 154, 155, 156));
  CountData rank1(256, {2, 3}, /*rank=*/1);
  EXPECT_THAT(Values(rank1.Next().inputs),
              ElementsAre(203, 204, 205, 195, 196, 197));
  // Tokens are modulo the vocabulary.
  const Batch small = CountData(/*vocab=*/3, {1, 5}, /*rank=*/0).Next();
  const std::vector<int64_t> inputs = Values(small.inputs);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(inputs[i + 1], (inputs[i] + 1) % 3);
  EXPECT_EQ(Values(small.targets)[4], (inputs[4] + 1) % 3);
}

// Gives 100 * part, 100 * part + 1, ...
class Numbers final : public BatchSource {
 public:
  explicit Numbers(int part) : next_(int64_t{100} * part) {}
  Batch Next() override {
    const at::Tensor number = at::full({1, 1}, next_++, at::kLong);
    return {number, number};
  }

 private:
  int64_t next_;
};

// Part 1 comes late, goes away and is taken up again.
TEST(PartBatchesTest, AreThoseOfTheStepAndPart) {
  PartBatches batches([](int part) { return std::make_unique<Numbers>(part); });
  const struct {
    int64_t step;
    int part;
    int64_t number;
  } cases[] = {{0, 0, 0},   {1, 0, 1}, {7, 1, 107},
               {8, 1, 108}, {9, 0, 9}, {10, 1, 110}};
  for (const auto& c : cases) {
    batches.Select(c.step, c.part);
    EXPECT_EQ(batches.Next().inputs.item<int64_t>(), c.number);
  }
}

}  // namespace
}  // namespace gpt
