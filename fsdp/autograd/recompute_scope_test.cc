// What a recomputation undoes, and in which order it ends.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <vector>

#include "fsdp/autograd/autograd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;

TEST(RecomputeScopeTest, ABufferGetsTheValueThatItHadBeforeItWasFirstKept) {
  at::Tensor buffer = at::full({2}, 1.0);
  {
    RecomputeScope scope({}, /*restores_buffers=*/true);
    scope.KeepBuffers({at::Tensor(), buffer});
    buffer.fill_(2);
    scope.KeepBuffers({buffer});  // a second unit has it, too
    buffer.fill_(3);
  }
  EXPECT_EQ(buffer[0].item<float>(), 1);
}

TEST(RecomputeScopeTest, TheLastThatWasAskedForIsCalledFirst) {
  std::vector<int> calls;
  RecomputeScope scope({}, /*restores_buffers=*/false);
  for (int i : {1, 2, 3}) {
    scope.AtEnd([&calls, i] { calls.push_back(i); });
  }
  scope.Finish();
  EXPECT_THAT(calls, ElementsAre(3, 2, 1));
}

}  // namespace
}  // namespace fsdp
