#include <cstdint>

#include "base/testing/status_matchers.h"
#include "planner/simulator/simulator.h"

namespace fsdp::simulator {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

// Returns a root that owns 10 elements, and two units.
ModelShape Model() {
  ModelShape model;
  model.units.resize(3);
  model.units[0].name = "root";
  model.units[0].parameters = {Parameter("a", {10})};
  for (int i : {1, 2}) {
    UnitShape& unit = model.units[i];
    unit.name = i == 1 ? "one" : "two";
    unit.parent = 0;
    unit.parameters = {Parameter("weight", {37, 11}), Parameter("bias", {37})};
  }
  return model;
}

TEST(GptTest, AGptIsARootAndItsBlocks) {
  GptShape gpt;
  gpt.layers = 3;
  gpt.dim = 10;
  gpt.vocab = 7;
  gpt.seq = 5;
  gpt.batch = 2;
  ASSERT_OK_AND_ASSIGN(const ModelShape model, MakeGpt(gpt));
  ASSERT_EQ(model.units.size(), 4u);
  EXPECT_EQ(model.units[3].name, "blocks.2");
  EXPECT_EQ(model.units[3].parent, 0);
  EXPECT_EQ(model.units[3].parameters.size(), 12u);
  // Two norms, four linear layers with biases; embeddings, norm and head.
  const int64_t block = 2 * 20 + (30 + 10 + 40) * 10 + 10 * 40 + 30 + 10 + 50;
  EXPECT_EQ(model.num_elements(), 3 * block + 70 + 50 + 20 + 70);
  EXPECT_EQ(model.units[1].forward.flops,
            2.0 * 10 * 12 * 100 + 4.0 * 10 * 5 * 10);
  EXPECT_EQ(model.units[1].backward.flops, 2 * model.units[1].forward.flops);
  EXPECT_EQ(model.units[0].forward.flops, 2.0 * 10 * 70);
  gpt.recompute = true;
  ASSERT_OK_AND_ASSIGN(const ModelShape again, MakeGpt(gpt));
  EXPECT_EQ(again.units[1].backward.flops, 3 * again.units[1].forward.flops);
  EXPECT_EQ(again.units[0].backward.flops, 2 * again.units[0].forward.flops);
}

TEST(GptTest, AGptHasSizesThatFit) {
  const auto with = [](int64_t GptShape::*size, int64_t value) {
    GptShape gpt;
    gpt.*size = value;
    return MakeGpt(gpt);
  };
  EXPECT_OK(with(&GptShape::layers, 0));
  EXPECT_OK(with(&GptShape::dim, int64_t{1} << 20));
  EXPECT_THAT(with(&GptShape::layers, -1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layers -1: it has to be from 0")));
  EXPECT_THAT(with(&GptShape::dim, 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dim")));
  EXPECT_THAT(with(&GptShape::vocab, int64_t{1} << 40),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("vocab")));
}

TEST(ShardingTest, HybridShardsInARowAndReplicatesAcross) {
  ShardingOptions options;
  options.ranks = 12;
  options.shard_ranks = 4;
  options.backward_group_size = 2;
  ASSERT_OK_AND_ASSIGN(const ShardedShape shape, Shard(Model(), options));
  EXPECT_EQ(shape.shard.size, 4);
  EXPECT_EQ(shape.shard.stride, 1);
  EXPECT_EQ(shape.replicate.size, 3);
  EXPECT_EQ(shape.replicate.stride, 4);
  EXPECT_EQ(shape.part.size, 2);
  EXPECT_EQ(shape.bytes[1].part, shape.messages[1].gather / 2);
  EXPECT_TRUE(shape.units[1].replicated);
  EXPECT_TRUE(shape.units[1].keeps_part);
  options.backward_group_size = 4;
  EXPECT_EQ(Shard(Model(), options)->part.size, 0);
}

TEST(ShardingTest, EmptyUnitsHaveNoGradients) {
  ModelShape model = Model();
  model.units[0].parameters.clear();
  ShardingOptions options;
  options.ranks = 2;
  ASSERT_OK_AND_ASSIGN(const ShardedShape shape, Shard(model, options));
  EXPECT_FALSE(shape.bytes[0].trainable);
  EXPECT_EQ(shape.messages[0].reduce, 0);
  EXPECT_EQ(shape.bytes[0].gradient, 0);
  EXPECT_TRUE(shape.bytes[1].trainable);
}

TEST(ShardingTest, RefusesWhatDoesNotFit) {
  const auto refusal = [](void (*change)(ShardingOptions&)) {
    ShardingOptions options;
    options.ranks = 12;
    change(options);
    return Shard(Model(), options).status();
  };
  const auto is_refused = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_OK(refusal([](ShardingOptions&) {}));
  EXPECT_THAT(refusal([](ShardingOptions& o) { o.shard_ranks = 5; }),
              is_refused("does not divide the 12 ranks"));
  EXPECT_THAT(refusal([](ShardingOptions& o) { o.shard_ranks = -4; }),
              is_refused("is -4"));
  EXPECT_THAT(refusal([](ShardingOptions& o) {
                o.shard_ranks = 4;
                o.backward_group_size = 3;
              }),
              is_refused("does not divide the 4 ranks"));
  EXPECT_THAT(refusal([](ShardingOptions& o) {
                o.strategy = Strategy::kGradients;
                o.backward_group_size = 3;
              }),
              is_refused("frees units after forward"));
  EXPECT_THAT(refusal([](ShardingOptions& o) {
                o.strategy = Strategy::kReplicated;
                o.shard_ranks = 4;
              }),
              is_refused("not sharded over 4"));
  ModelShape twice = Model();
  twice.units[2].parameters[1].name = "weight";
  EXPECT_THAT(Shard(twice, ShardingOptions()).status(),
              is_refused("unit two: flat layout"));
}

}  // namespace
}  // namespace fsdp::simulator
