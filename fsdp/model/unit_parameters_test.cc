#include "fsdp/model/unit_parameters.h"

#include <ATen/ops/ones.h>
#include <c10/core/ScalarType.h>

#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A weight, a pair of tied tensors of which one is frozen, and a frozen bias.
class UnitParametersTest : public ::testing::Test {
 protected:
  UnitParametersTest() {
    parameters_.Add("weight", {Trained()}, at::ones({2}));
    parameters_.Add("tied", {at::ones({3}), Trained()}, at::ones({1}));
    parameters_.Add("bias", {at::ones({3})}, at::ones({0}));
    parameters_.SeeVersions();
    parameters_.NoteWrittenShards();
  }

  static at::Tensor Trained() { return at::ones({3}).requires_grad_(); }
  at::Tensor Tensor(int slot, int i = 0) {
    return parameters_.slots()[slot].tensors[i];
  }
  at::Tensor Shard(int slot) { return parameters_.slots()[slot].shard; }
  static void Write(const at::Tensor& tensor) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }

  UnitParameters parameters_{"block"};
};

TEST_F(UnitParametersTest, BetweenForwardsOnlyShardsAreLeaves) {
  parameters_.AttachSentinels();
  EXPECT_TRUE(Shard(0).requires_grad());
  EXPECT_TRUE(Shard(1).requires_grad());
  EXPECT_FALSE(Shard(2).requires_grad());
  EXPECT_FALSE(Tensor(0).is_leaf());
  EXPECT_TRUE(Tensor(1, 0).is_leaf());
  EXPECT_FALSE(Tensor(1, 1).is_leaf());
  EXPECT_THROW(Tensor(0).sum().backward(), std::exception);
  parameters_.ClearEdges();
  EXPECT_TRUE(Tensor(0).is_leaf());
  EXPECT_TRUE(Tensor(0).requires_grad());
}

TEST_F(UnitParametersTest, TakesWhatIsTrainedAtPresent) {
  parameters_.AttachSentinels();
  ParameterSlots trainable = parameters_.TakeTrainable();
  EXPECT_THAT(trainable, ElementsAre(SizeIs(1), SizeIs(1), IsEmpty()));
  EXPECT_TRUE(trainable[1][0].is_same(Tensor(1, 1)));
  EXPECT_TRUE(Tensor(0).is_leaf());
  Tensor(0).set_requires_grad(false);
  Tensor(2).set_requires_grad(true);
  trainable = parameters_.TakeTrainable();
  EXPECT_THAT(trainable, ElementsAre(IsEmpty(), SizeIs(1), SizeIs(1)));
  EXPECT_FALSE(Shard(0).requires_grad());
  EXPECT_TRUE(Shard(2).requires_grad());
}

TEST_F(UnitParametersTest, RestoringDoesNotAskTheTensorsOfFrozenShards) {
  parameters_.AttachSentinels();
  parameters_.TakeTrainable();
  Tensor(2).set_requires_grad(true);
  parameters_.RestoreSentinels();
  EXPECT_FALSE(Tensor(0).is_leaf());
  EXPECT_TRUE(Tensor(2).is_leaf());
  EXPECT_FALSE(Shard(2).requires_grad());
}

TEST_F(UnitParametersTest, FreezingDropsTheGradient) {
  parameters_.AttachSentinels();
  Shard(0).mutable_grad() = at::ones({2});
  ASSERT_OK(parameters_.SetTrainable(0, false));
  EXPECT_FALSE(Shard(0).grad().defined());
  EXPECT_FALSE(Shard(0).requires_grad());
  EXPECT_FALSE(Tensor(0).requires_grad());
  ASSERT_OK(parameters_.SetTrainable(0, true));
  EXPECT_TRUE(Shard(0).requires_grad());
  EXPECT_FALSE(Tensor(0).is_leaf());
  parameters_.Add("bytes", {at::ones({3}, c10::kByte)},
                  at::ones({1}, c10::kByte));
  EXPECT_OK(parameters_.SetTrainable(3, false));
  EXPECT_THAT(parameters_.SetTrainable(3, true),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("bytes"), HasSubstr("Byte"))));
}

TEST_F(UnitParametersTest, WritesToShardsAreWritesToTensors) {
  const auto before = Tensor(1)._version();
  EXPECT_FALSE(parameters_.NoteWrittenShards());
  const std::vector<uint32_t> versions = parameters_.ShardVersions();
  Write(Shard(1));
  EXPECT_NE(parameters_.ShardVersions(), versions);
  EXPECT_TRUE(parameters_.NoteWrittenShards());
  EXPECT_FALSE(parameters_.NoteWrittenShards());
  EXPECT_EQ(Tensor(1, 0)._version(), before + 1);
  EXPECT_EQ(Tensor(1, 1)._version(), before + 1);
  EXPECT_OK(parameters_.CheckUnwrittenBetweenForwards());
  EXPECT_OK(parameters_.CheckUnwrittenInForward());
}

TEST_F(UnitParametersTest, RefusesWritesToTensors) {
  Write(Tensor(2));
  // A write to the shard does not hide it.
  Write(Shard(2));
  parameters_.NoteWrittenShards();
  EXPECT_THAT(parameters_.CheckUnwrittenBetweenForwards(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("parameter bias of unit block was written")));
  EXPECT_THAT(parameters_.CheckUnwrittenInForward(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("parameter bias was modified in place during "
                                 "the forward of unit block")));
  parameters_.SeeVersions();
  EXPECT_OK(parameters_.CheckUnwrittenBetweenForwards());
  EXPECT_OK(parameters_.CheckUnwrittenInForward());
  Write(Tensor(1, 1));  // of two that are tied
  EXPECT_FALSE(parameters_.CheckUnwrittenBetweenForwards().ok());
  EXPECT_FALSE(parameters_.CheckUnwrittenInForward().ok());
}

TEST(UnusedParametersTest, AreNamedOnceAfterTwoSteps) {
  std::vector<TensorRange> shards;
  for (const char* name : {"used", "frozen", "late", "unused"}) {
    shards.push_back({name, {2}, {1}, 0, at::ones({2})});
    shards.back().values.set_requires_grad(std::string(name) != "frozen");
  }
  UnusedParameters unused;
  // A step whose backward gives these a gradient.
  const auto step = [&](const std::vector<int>& with_gradient) {
    for (const int i : with_gradient) {
      shards[i].values.mutable_grad() = at::ones({2});
    }
    unused.NoteGradients(shards);
    for (const TensorRange& each : shards) each.values.mutable_grad().reset();
    return unused.NoteEndOfStep(shards);
  };
  EXPECT_THAT(unused.NoteEndOfStep(shards), IsEmpty());
  EXPECT_THAT(step({0}), IsEmpty());
  EXPECT_THAT(step({0, 2}), ElementsAre("unused"));
  EXPECT_THAT(step({0}), IsEmpty());
}

}  // namespace
}  // namespace fsdp
