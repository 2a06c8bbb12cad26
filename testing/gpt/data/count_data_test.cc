#include "testing/gpt/data/count_data.h"

#include <cstdint>
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
}

TEST(CountDataTest, CountsModuloTheVocabulary) {
  CountData data(/*vocab=*/3, {1, 5}, /*rank=*/0);
  const Batch batch = data.Next();
  const std::vector<int64_t> inputs = Values(batch.inputs);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(inputs[i + 1], (inputs[i] + 1) % 3);
  EXPECT_EQ(Values(batch.targets)[4], (inputs[4] + 1) % 3);
}

}  // namespace
}  // namespace gpt
