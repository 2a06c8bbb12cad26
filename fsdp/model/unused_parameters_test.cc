#include "fsdp/model/unused_parameters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ranges/tensor_range.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class UnusedParametersTest : public ::testing::Test {
 protected:
  UnusedParametersTest() {
    for (const char* name : {"used", "frozen", "late", "unused"}) {
      shards_.push_back({name, {2}, {1}, 0, at::ones({2})});
      shards_.back().values.set_requires_grad(std::string(name) != "frozen");
    }
  }

  // A backward that gives these a gradient.
  void Backward(const std::vector<int>& with_gradient) {
    for (const int i : with_gradient) {
      shards_[i].values.mutable_grad() = at::ones({2});
    }
    unused_.NoteGradients(shards_);
  }
  void ZeroGrad() {
    for (const TensorRange& named : shards_)
      named.values.mutable_grad().reset();
  }

  std::vector<TensorRange> shards_;
  UnusedParameters unused_;
};

TEST_F(UnusedParametersTest, NamesThemOnceAfterTwoSteps) {
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), IsEmpty());
  Backward({0});
  ZeroGrad();
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), IsEmpty());
  Backward({0, 2});
  ZeroGrad();
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), ElementsAre("unused"));
  Backward({0});
  ZeroGrad();
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), IsEmpty());
}

TEST_F(UnusedParametersTest, AStepEndsWhenGradientsAreDropped) {
  Backward({0});
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), IsEmpty());
  Backward({3});
  ZeroGrad();
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), IsEmpty());
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), IsEmpty());
  Backward({0});
  ZeroGrad();
  EXPECT_THAT(unused_.NoteEndOfStep(shards_), ElementsAre("late"));
}

}  // namespace
}  // namespace fsdp
