#include "testing/gpt/data/part_batches.h"

#include <ATen/ops/full.h>

#include <cstdint>
#include <memory>

#include "gtest/gtest.h"
#include "testing/gpt/data/batch.h"

namespace gpt {
namespace {

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

PartBatches Parts() {
  return PartBatches([](int part) { return std::make_unique<Numbers>(part); });
}

int64_t At(PartBatches& batches, int64_t step, int part) {
  batches.Select(step, part);
  return batches.Next().inputs.item<int64_t>();
}

TEST(PartBatchesTest, AreThoseOfTheStepAndPart) {
  PartBatches batches = Parts();
  EXPECT_EQ(At(batches, 0, 0), 0);
  EXPECT_EQ(At(batches, 1, 0), 1);
  EXPECT_EQ(At(batches, 2, 0), 2);
}

TEST(PartBatchesTest, WhoComesLateSkipsWhatIsDone) {
  PartBatches batches = Parts();
  EXPECT_EQ(At(batches, 7, 1), 107);
  EXPECT_EQ(At(batches, 8, 1), 108);
}

TEST(PartBatchesTest, APartThatIsTakenUpAgainGoesOn) {
  PartBatches batches = Parts();
  EXPECT_EQ(At(batches, 0, 1), 100);
  EXPECT_EQ(At(batches, 1, 1), 101);
  // The first replica is away.
  EXPECT_EQ(At(batches, 2, 0), 2);
  EXPECT_EQ(At(batches, 3, 0), 3);
  // It is back.
  EXPECT_EQ(At(batches, 4, 1), 104);
  EXPECT_EQ(At(batches, 5, 0), 5);
}

}  // namespace
}  // namespace gpt
