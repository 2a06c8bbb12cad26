#include "testing/gpt/data/text_batches.h"

#include <cstdint>
#include <set>
#include <string>
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

// Byte i of the text is i.
std::string Ramp(int size) {
  std::string text;
  for (int i = 0; i < size; ++i) text.push_back(static_cast<char>(i));
  return text;
}

TEST(TextBatchesTest, TargetsFollowInputs) {
  const Batch batch = WindowsAt(
      "ab\xFF"
      "d",
      {0, 1}, 2);
  EXPECT_THAT(Values(batch.inputs), ElementsAre('a', 'b', 'b', 255));
  EXPECT_THAT(Values(batch.targets), ElementsAre('b', 255, 255, 'd'));
}

TEST(TextBatchesTest, RandomWindowsReachAllPlacesAndNoOthers) {
  const std::string text = Ramp(9);
  RandomWindows windows(text, {4, 5}, /*seed=*/1);
  std::set<int64_t> starts;
  for (int i = 0; i < 50; ++i) {
    const Batch batch = windows.Next();
    for (int row = 0; row < 4; ++row) {
      const std::vector<int64_t> inputs = Values(batch.inputs[row]);
      EXPECT_EQ(inputs[4], inputs[0] + 4);
      EXPECT_EQ(Values(batch.targets[row])[4], inputs[0] + 5);
      starts.insert(inputs[0]);
    }
  }
  EXPECT_THAT(starts, ElementsAre(0, 1, 2, 3));
}

TEST(TextBatchesTest, ATextOfOneWindowIsEnough) {
  RandomWindows windows("abc", {1, 2}, /*seed=*/1);
  EXPECT_THAT(Values(windows.Next().targets), ElementsAre('b', 'c'));
}

TEST(TextBatchesTest, StreamsDependOnTheSeedAlone) {
  const std::string text = Ramp(200);
  RandomWindows a(text, {8, 3}, 1), b(text, {8, 3}, 1), c(text, {8, 3}, 2);
  const std::vector<int64_t> first = Values(a.Next().inputs);
  EXPECT_EQ(first, Values(b.Next().inputs));
  EXPECT_NE(first, Values(c.Next().inputs));
  EXPECT_NE(first, Values(a.Next().inputs));
}

TEST(TextBatchesTest, EvenWindowsAreSharedBetweenRanks) {
  const std::string text = Ramp(102);
  std::multiset<int64_t> starts;
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<Batch> batches = EvenWindows(text, {2, 2}, 9, rank, 2);
    ASSERT_EQ(batches.size(), 2);
    for (const Batch& batch : batches) {
      starts.insert(Values(batch.inputs)[0]);
      starts.insert(Values(batch.inputs)[2]);
    }
  }
  EXPECT_THAT(starts, ElementsAre(0, 11, 22, 33, 44, 55, 66, 77));
}

}  // namespace
}  // namespace gpt
