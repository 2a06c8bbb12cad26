#include "testing/gpt/flags/options.h"

#include <limits>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(OptionsTest, TheDefaultsAreSound) { EXPECT_OK(CheckOptions({})); }

TEST(OptionsTest, HeadsDivideTheWidth) {
  TrainOptions options;
  options.model.dim = 10;
  options.model.heads = 3;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--heads=3 does not divide "
                                           "--dim=10")));
}

TEST(OptionsTest, SizesArePositive) {
  for (int64_t GptConfig::*size :
       {&GptConfig::layers, &GptConfig::dim, &GptConfig::heads, &GptConfig::seq,
        &GptConfig::vocab}) {
    for (int64_t value : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
      TrainOptions options;
      options.model.*size = value;
      EXPECT_THAT(CheckOptions(options),
                  StatusIs(kInvalid, HasSubstr("expected 1 to 1048576")));
    }
  }
  TrainOptions options;
  options.batch = 0;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--batch=0")));
}

TEST(OptionsTest, JitterIsAShareOfTheTimeOfOneRank) {
  TrainOptions options;
  options.jitter = 0.05;
  options.jitter_rank = 1;
  EXPECT_OK(CheckOptions(options));
  options.jitter_rank = -1;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--jitter-rank=-1")));
  options.jitter_rank = 0;
  for (const double share : {-0.1, std::numeric_limits<double>::quiet_NaN()}) {
    options.jitter = share;
    EXPECT_THAT(CheckOptions(options),
                StatusIs(kInvalid, HasSubstr("--jitter=")));
  }
}

TEST(OptionsTest, OnlyShardedModelsAreOffloaded) {
  TrainOptions options;
  options.offload.optimizer = fsdp::Tier::kSsd;
  EXPECT_OK(CheckOptions(options));
  options.sharding = Sharding::kNone;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--offload with --sharding=none")));
}

TEST(OptionsTest, OnlyShardedModelsAreRecomputed) {
  TrainOptions options;
  options.recompute = true;
  EXPECT_OK(CheckOptions(options));
  options.sharding = Sharding::kNone;
  EXPECT_THAT(
      CheckOptions(options),
      StatusIs(kInvalid, HasSubstr("--recompute with --sharding=none")));
}

TEST(OptionsTest, RanksThatUseGpusAreProcesses) {
  TrainOptions options;
  options.device = Device::kCuda;
  EXPECT_OK(CheckOptions(options));
  options.backend = Backend::kLocal;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--backend=local with --device=cuda "
                                           "and --ranks=2")));
  options.ranks = 1;
  EXPECT_OK(CheckOptions(options));
}

TEST(OptionsTest, ADevicesBackendNeedsADevice) {
  TrainOptions options;
  options.staged = true;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--staged without --device=cuda")));
  options.device = Device::kCuda;
  EXPECT_OK(CheckOptions(options));
}

TEST(OptionsTest, CheckpointsNeedAFolder) {
  TrainOptions options;
  options.save_every = 5;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--save-every without --save")));
  options.resume = true;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--resume without --save")));
  options.save = "runs";
  options.keep_last = 2;
  EXPECT_OK(CheckOptions(options));
  options.offload.keep = true;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--resume with --keep")));
  options = {};
  options.keep_last = 1;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--keep-last without --save")));
  options.keep_last = -1;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--keep-last=-1: expected 0")));
}

TEST(OptionsTest, NamesTheFlagThatIsOutOfRange) {
  TrainOptions options;
  options.ranks = 0;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--ranks=0")));
  options = {};
  options.steps = 0;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--steps=0")));
  options = {};
  options.warmup = -1;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--warmup=-1: expected 0")));
  options = {};
  options.trace_steps = 0;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--trace-steps=0")));
  options = {};
  options.lr = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(CheckOptions(options), StatusIs(kInvalid, HasSubstr("--lr=nan")));
}

TEST(OptionsTest, RestartsNeedSomethingToGoOnFrom) {
  TrainOptions options;
  options.max_restarts = 3;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("nothing to go on from")));
  options.save = "runs";
  options.resume = true;
  EXPECT_OK(CheckOptions(options));
  options.restart_ranks = RestartRanks::kFewer;
  EXPECT_OK(CheckOptions(options));
  options.backend = Backend::kLocal;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("with --backend=local")));
  options.ranks = 1;
  EXPECT_OK(CheckOptions(options));
  options.max_restarts = -1;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--max-restarts=-1")));
}

TEST(OptionsTest, AReplicaGoesOnFromAnotherOne) {
  TrainOptions options;
  options.max_restarts = 3;
  options.replicas = 2;
  EXPECT_OK(CheckOptions(options));
  // Checkpoints there would be in the way.
  options.save = "runs";
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("nothing to go on from")));
  options.resume = true;
  EXPECT_OK(CheckOptions(options));
}

TEST(OptionsTest, ReplicasAreProcessesAlike) {
  TrainOptions replicas;
  replicas.replicas = 2;
  EXPECT_OK(CheckOptions(replicas));
  TrainOptions options = replicas;
  options.backend = Backend::kLocal;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--replicas with --backend=local")));
  options = replicas;
  options.device = Device::kCuda;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--replicas with --device=cuda")));
  options = replicas;
  options.offload.optimizer = fsdp::Tier::kSsd;
  EXPECT_OK(CheckOptions(options));
  options.offload.keep = true;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--replicas with --keep")));
  options = replicas;
  options.max_restarts = 1;
  options.restart_ranks = RestartRanks::kFewer;
  EXPECT_THAT(
      CheckOptions(options),
      StatusIs(kInvalid, HasSubstr("--replicas with --restart-ranks=fewer")));
  options = {};
  options.replicas = -1;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--replicas=-1: expected 0")));
}

TEST(OptionsTest, KeptFilesAreForOneNumberOfRanks) {
  TrainOptions options;
  options.max_restarts = 3;
  options.offload.optimizer = fsdp::Tier::kSsd;
  options.offload.keep = true;
  EXPECT_OK(CheckOptions(options));
  options.restart_ranks = RestartRanks::kFewer;
  EXPECT_THAT(
      CheckOptions(options),
      StatusIs(kInvalid, HasSubstr("--restart-ranks=fewer with --keep")));
}

TEST(OptionsTest, FewerRanksAreForRestarts) {
  TrainOptions options;
  options.restart_ranks = RestartRanks::kFewer;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--restart-ranks=fewer without")));
  options.restart_ranks = RestartRanks::kSame;
  options.min_ranks = 2;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(kInvalid, HasSubstr("--min-ranks without")));
  options.min_ranks = 3;
  EXPECT_THAT(CheckOptions(options), StatusIs(kInvalid, HasSubstr("1 to 2")));
}

TEST(CheckOptionsTest, WhatIsChosenCannotBeGiven) {
  TrainOptions options;
  options.auto_memory = 1;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--auto-memory without --auto")));
  options.automatic = true;
  EXPECT_OK(CheckOptions(options));
  options.auto_memory = 0;
  EXPECT_THAT(CheckOptions(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--auto needs --auto-memory")));
  options.auto_memory = 1;
  const auto refuses = [&options](const char* flag, auto set) {
    TrainOptions changed = options;
    set(changed);
    EXPECT_THAT(CheckOptions(changed),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(flag)));
  };
  refuses("--auto with --sharding",
          [](TrainOptions& o) { o.sharding = Sharding::kOptimizer; });
  refuses("--auto with --offload",
          [](TrainOptions& o) { o.offload.optimizer = fsdp::Tier::kSsd; });
  refuses("--auto with --recompute",
          [](TrainOptions& o) { o.recompute = true; });
  refuses("--auto with --replicas", [](TrainOptions& o) { o.replicas = 2; });
}

}  // namespace
}  // namespace gpt
