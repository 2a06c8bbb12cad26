#include "testing/gpt/options.h"

#include <c10/core/DeviceType.h>

#include "base/testing/parsed_flags.h"
#include "base/testing/status_matchers.h"

namespace gpt {
namespace {

using ::fsdp::comm::Environment;
using ::fsdp::comm::StartedBy;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::StatusOr<TrainOptions> Parse(const std::string& flags) {
  return fsdp::testing::ParsedBy(ParseFlags, "train " + flags);
}

// Runs of train_test, runs/ and benchmarks/peers show what the other flags do.
TEST(OptionsTest, ReadsFlagsThatNoRunOfATestShows) {
  ASSERT_OK_AND_ASSIGN(
      const TrainOptions options,
      Parse("--warmup=11 --threads=13 --jitter=0.05 --jitter-rank=1 --save=s "
            "--nosave_async --object_store --replicas=2"));
  EXPECT_EQ(options.warmup, 11);
  EXPECT_EQ(options.threads, 13);
  EXPECT_EQ(options.jitter, 0.05);
  EXPECT_EQ(options.jitter_rank, 1);
  EXPECT_FALSE(options.save_async);
  EXPECT_TRUE(options.object_store);
}

TEST(OptionsTest, ReadsWhatIsChosenOrKept) {
  ASSERT_OK_AND_ASSIGN(TrainOptions options,
                       Parse("--device=cuda --save=s --resume --max-restarts=1 "
                             "--restart-ranks=fewer --sharding=none"));
  EXPECT_EQ(options.device, c10::kCUDA);
  EXPECT_EQ(options.save, "s");
  EXPECT_EQ(options.export_dir, "");
  EXPECT_TRUE(options.restart_fewer);
  EXPECT_EQ(options.sharding, std::nullopt);
  EXPECT_FALSE(options.offload.any());
  ASSERT_OK_AND_ASSIGN(options, Parse("--auto --auto-memory=3KiB"));
  EXPECT_TRUE(options.automatic);
  EXPECT_EQ(options.auto_memory, 3 << 10);
  EXPECT_EQ(options.offload.directory, "");
  ASSERT_OK_AND_ASSIGN(options,
                       Parse("--auto --auto-memory=8GiB --offload-dir=/x"));
  EXPECT_EQ(options.auto_memory, int64_t{8} << 30);
  EXPECT_FALSE(options.offload.any());
  EXPECT_EQ(options.offload.directory, "/x");
  ASSERT_OK_AND_ASSIGN(options, Parse("--offload=ssd --keep=name"));
  EXPECT_TRUE(options.offload.keep);
  EXPECT_EQ(options.offload.name, "name");
  EXPECT_NE(options.offload.directory, "") << "the one for temporary files";
}

TEST(OptionsTest, AcceptsWhatGoesTogether) {
  for (const char* flags :
       {"", "--device=cuda --ranks=1",
        "--save=s --resume --keep-last=2 --save-every=5",
        "--save=s --resume --max-restarts=3 --restart-ranks=fewer",
        "--max-restarts=3 --offload=ssd --keep=x",
        "--max-restarts=3 --replicas=2",
        "--max-restarts=3 --replicas=2 --save=s --resume",
        "--replicas=2 --offload=ssd"}) {
    EXPECT_OK(Parse(flags)) << flags;
  }
}

TEST(OptionsTest, RefusesWhatIsWrongAndNamesIt) {
  const struct {
    const char* flags;
    const char* why;
  } cases[] = {
      {"stray", "what is stray?"},
      {"--backend=mpi", "expected auto, local, shared_memory or gloo"},
      {"--device=tpu", "--device=tpu: expected one of cpu, cuda"},
      {"--offload=SSD", "--offload=SSD: expected one of cpu, none, ssd"},
      {"--memory-budget=8GB", "such as 8GiB"},
      {"--memory-budget=GiB", "such as 8GiB"},
      {"--memory-budget=-1", "such as 8GiB"},
      {"--memory-budget=8589934592GiB", "such as 8GiB"},
      {"--memory-budget=3MiB", "--memory-budget=3MiB without --offload"},
      {"--auto --auto-memory=1GiB --memory-budget=1GiB",
       "--memory-budget=1GiB without --offload"},
      {"--offload-dir=/x", "--offload-dir=/x without --offload"},
      {"--keep=x", "--keep=x without --offload"},
      {"--layers=0", "--layers=0: expected 1 to 1048576"},
      {"--seq=1099511627776", "--seq=1099511627776: expected 1"},
      {"--heads=3 --dim=10", "--heads=3 does not divide --dim=10"},
      {"--jitter=nan", "--jitter="},
      {"--save-every=5", "--save-every without --save"},
      {"--keep-last=1", "--keep-last without --save"},
      {"--resume", "--resume without --save"},
      {"--resume --save=s --offload=ssd --keep=x", "--resume with --keep"},
      {"--max-restarts=3", "nothing to go on from"},
      {"--max-restarts=3 --replicas=2 --save=s", "nothing to go on from"},
      {"--restart-ranks=fewer", "--restart-ranks=fewer without"},
      {"--max-restarts=3 --offload=ssd --keep=x --restart-ranks=fewer",
       "--restart-ranks=fewer with --keep"},
      {"--replicas=2 --device=cuda", "--replicas with --device=cuda"},
      {"--replicas=2 --offload=ssd --keep=x", "--replicas with --keep"},
      {"--replicas=2 --max-restarts=1 --restart-ranks=fewer",
       "--replicas with --restart-ranks=fewer"},
      {"--sharding=none --offload=ssd", "--offload with --sharding=none"},
      {"--auto-memory=1", "--auto-memory without --auto"},
      {"--auto", "--auto needs --auto-memory"},
      {"--auto --auto-memory=1 --sharding=optimizer", "--auto with --sharding"},
      {"--auto --auto-memory=1 --offload=ssd", "--auto with --offload"},
      {"--auto --auto-memory=1 --replicas=2", "--auto with --replicas"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(Parse(c.flags), StatusIs(kInvalid, HasSubstr(c.why)))
        << c.flags;
  }
  EXPECT_EXIT(Parse("--layer=3").IgnoreError(), ::testing::ExitedWithCode(1),
              "layer");
}

Environment Replica(int replica, int replicas) {
  Environment environment;
  environment.started_by = StartedBy::kRanksFlag;
  environment.replica = replica;
  environment.replicas = replicas;
  return environment;
}

TEST(OptionsOfReplicaTest, WhatEachWritesHasItsNumber) {
  TrainOptions options;
  options.json = "report.json";
  options.save = "/runs/gpt";
  options.save_init = "init";
  options.init = "here";
  options.export_dir = "model";
  options.replica_history = "history";
  ASSERT_OK_AND_ASSIGN(const TrainOptions mine,
                       OptionsOfReplica(options, Replica(2, 3)));
  EXPECT_EQ(mine.replicas, 3);
  EXPECT_EQ(mine.json, "report.json.2");
  EXPECT_EQ(mine.save, "/runs/gpt.2");
  EXPECT_EQ(mine.save_init, "init.2");
  EXPECT_EQ(mine.trace, "");
  // All read these, one of them writes them, or they have numbers anyway.
  EXPECT_EQ(mine.init, "here");
  EXPECT_EQ(mine.export_dir, "model");
  EXPECT_EQ(mine.replica_history, "history");
  // A run alone, and what starts replicas, is as it was.
  for (const int replicas : {0, 2}) {
    options.replicas = replicas;
    if (replicas == 0) options.replica_history = "";
    ASSERT_OK_AND_ASSIGN(const TrainOptions alone,
                         OptionsOfReplica(options, {}));
    EXPECT_EQ(alone.replicas, replicas);
    EXPECT_EQ(alone.json, "report.json");
  }
}

TEST(OptionsOfReplicaTest, RefusesWhatWasNotStartedSo) {
  TrainOptions options;
  options.replicas = 2;
  EXPECT_OK(OptionsOfReplica(options, Replica(1, 2)));
  EXPECT_THAT(OptionsOfReplica(options, Replica(1, 3)),
              StatusIs(kInvalid, HasSubstr("one of 3 replicas")));
  Environment rank;
  rank.started_by = StartedBy::kTorchrun;
  EXPECT_THAT(OptionsOfReplica(options, rank),
              StatusIs(kInvalid, HasSubstr("--replicas=2")));
  options = {};
  options.device = c10::kCUDA;
  EXPECT_OK(OptionsOfReplica(options, {}));
  EXPECT_THAT(OptionsOfReplica(options, Replica(0, 2)),
              StatusIs(kInvalid, HasSubstr("--replicas with --device=cuda")));
  options = {};
  options.replica_history = "history";
  EXPECT_OK(OptionsOfReplica(options, Replica(0, 1)));
  EXPECT_THAT(OptionsOfReplica(options, {}),
              StatusIs(kInvalid, HasSubstr("--replica-history without")));
  options = {};
  options.replica_replay = "history";
  EXPECT_THAT(OptionsOfReplica(options, {}),
              StatusIs(kInvalid, HasSubstr("--replica-replay without")));
}

}  // namespace
}  // namespace gpt
