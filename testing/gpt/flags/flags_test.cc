#include "testing/gpt/flags/flags.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

absl::StatusOr<TrainOptions> Parse(std::vector<std::string> arguments) {
  absl::FlagSaver restore;
  arguments.insert(arguments.begin(), "train");
  std::vector<char*> argv;
  argv.reserve(arguments.size());
  for (std::string& argument : arguments) argv.push_back(&argument[0]);
  return ParseFlags(static_cast<int>(argv.size()), argv.data());
}

// This is the only test that calls ParseFlags() without
// BUILD_WORKING_DIRECTORY.
TEST(FlagsTest, ReadsEveryFlag) {
  unsetenv("BUILD_WORKING_DIRECTORY");
  ASSERT_OK_AND_ASSIGN(TrainOptions options,
                       Parse({"--ranks=3",
                              "--backend=gloo",
                              "--sharding=optimizer",
                              "--layers=5",
                              "--dim=12",
                              "--heads=6",
                              "--seq=7",
                              "--batch=8",
                              "--vocab=9",
                              "--steps=10",
                              "--warmup=11",
                              "--seed=12",
                              "--lr=0.5",
                              "--threads=13",
                              "--data=a-b",
                              "--json=c",
                              "--save-init=d-e",
                              "--init",
                              "f",
                              "--save=s-t",
                              "--save-every=16",
                              "--nosave_async",
                              "--keep-last=17",
                              "--object_store",
                              "--resume",
                              "--max-restarts=18",
                              "--restart-ranks=same",
                              "--min-ranks=2",
                              "--replicas=4",
                              "--replica-history=h",
                              "--replica-replay=i",
                              "--export=x",
                              "--sample=14",
                              "--precision=bf16",
                              "--recompute",
                              "--trace=t",
                              "--trace-steps=15",
                              "--offload=ssd",
                              "--offload-kinds=gradients,optimizer",
                              "--offload-dir=o",
                              "--memory-budget=16MiB"}));
  EXPECT_EQ(options.ranks, 3);
  EXPECT_EQ(options.backend, Backend::kGloo);
  EXPECT_EQ(options.sharding, Sharding::kOptimizer);
  EXPECT_EQ(options.precision, ComputeDtype::kBFloat16);
  EXPECT_TRUE(options.recompute);
  EXPECT_EQ(options.model.layers, 5);
  EXPECT_EQ(options.model.dim, 12);
  EXPECT_EQ(options.model.heads, 6);
  EXPECT_EQ(options.model.seq, 7);
  EXPECT_EQ(options.batch, 8);
  EXPECT_EQ(options.model.vocab, 9);
  EXPECT_EQ(options.steps, 10);
  EXPECT_EQ(options.warmup, 11);
  EXPECT_EQ(options.seed, 12);
  EXPECT_EQ(options.lr, 0.5);
  EXPECT_EQ(options.threads, 13);
  EXPECT_EQ(options.data, "a-b");
  EXPECT_EQ(options.json, "c");
  EXPECT_EQ(options.save_init, "d-e");
  EXPECT_EQ(options.init, "f");
  EXPECT_EQ(options.save, "s-t");
  EXPECT_EQ(options.save_every, 16);
  EXPECT_FALSE(options.save_async);
  EXPECT_EQ(options.keep_last, 17);
  EXPECT_TRUE(options.object_store);
  EXPECT_TRUE(options.resume);
  EXPECT_EQ(options.max_restarts, 18);
  EXPECT_EQ(options.replicas, 4);
  EXPECT_EQ(options.replica_history, "h");
  EXPECT_EQ(options.replica_replay, "i");
  EXPECT_EQ(options.min_ranks, 2);
  EXPECT_EQ(options.export_dir, "x");
  EXPECT_EQ(options.sample, 14);
  EXPECT_EQ(options.trace, "t");
  EXPECT_EQ(options.trace_steps, 15);
  EXPECT_EQ(options.offload.parameters, fsdp::Tier::kDevice);
  EXPECT_EQ(options.offload.gradients, fsdp::Tier::kSsd);
  EXPECT_EQ(options.offload.optimizer, fsdp::Tier::kSsd);
  EXPECT_EQ(options.offload.directory, "o");
  EXPECT_EQ(options.offload.memory_budget, 16 << 20);
}

TEST(FlagsTest, ReadsTheFlagsThatDoNotGoWithReplicas) {
  ASSERT_OK_AND_ASSIGN(
      const TrainOptions options,
      Parse({"--device=cuda", "--staged", "--save=s", "--resume",
             "--max-restarts=1", "--restart-ranks=fewer"}));
  EXPECT_EQ(options.device, Device::kCuda);
  EXPECT_TRUE(options.staged);
  EXPECT_EQ(options.restart_ranks, RestartRanks::kFewer);
}

TEST(FlagsTest, ReadsWhatIsToBeChosen) {
  ASSERT_OK_AND_ASSIGN(TrainOptions options,
                       Parse({"--auto", "--auto-memory=3MiB"}));
  EXPECT_TRUE(options.automatic);
  EXPECT_EQ(options.auto_memory, 3 << 20);
  EXPECT_EQ(options.offload.directory, "");
  ASSERT_OK_AND_ASSIGN(options, Parse({"--auto", "--auto-memory=3MiB",
                                       "--offload-dir=/scratch"}));
  EXPECT_FALSE(options.offload.any());
  EXPECT_EQ(options.offload.directory, "/scratch");
}

TEST(FlagsTest, ThreadsMayBeLeftToTheProgram) {
  ASSERT_OK_AND_ASSIGN(const TrainOptions options, Parse({"--threads=auto"}));
  EXPECT_EQ(options.threads, 0);
  EXPECT_EXIT((void)Parse({"--threads=many"}), ::testing::ExitedWithCode(1),
              "--threads|threads");
}

TEST(FlagsTest, RelativePathsAreTheUsers) {
  setenv("BUILD_WORKING_DIRECTORY", "/home/user", 1);
  ASSERT_OK_AND_ASSIGN(
      TrainOptions options,
      Parse({"--data=text", "--json=/abs/report", "--init=sub/init",
             "--trace=t.json", "--offload=ssd", "--offload-dir=scratch",
             "--save=runs", "--export=model", "--replicas=2",
             "--replica-history=history", "--replica-replay=/abs/history"}));
  EXPECT_EQ(options.data, "/home/user/text");
  EXPECT_EQ(options.json, "/abs/report");
  EXPECT_EQ(options.init, "/home/user/sub/init");
  EXPECT_EQ(options.trace, "/home/user/t.json");
  EXPECT_EQ(options.offload.directory, "/home/user/scratch");
  EXPECT_EQ(options.save, "/home/user/runs");
  EXPECT_EQ(options.export_dir, "/home/user/model");
  EXPECT_EQ(options.replica_history, "/home/user/history");
  EXPECT_EQ(options.replica_replay, "/abs/history");
  EXPECT_EQ(options.save_init, "");
  ASSERT_OK_AND_ASSIGN(options, Parse({"--data=count"}));
  EXPECT_EQ(options.data, "count");
}

TEST(FlagsTest, RefusesWhatIsWrong) {
  EXPECT_THAT(Parse({"--heads=3", "--dim=10"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("does not divide")));
  EXPECT_THAT(Parse({"--offload=ssd", "--sharding=none"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--offload with --sharding=none")));
  EXPECT_THAT(Parse({"--memory-budget=1GiB"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--memory-budget=1GiB without --offload")));
  EXPECT_THAT(Parse({"--auto", "--auto-memory=1GiB", "--memory-budget=1GiB"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--memory-budget=1GiB without --offload")));
  EXPECT_THAT(Parse({"--resume"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--resume without --save")));
  EXPECT_THAT(Parse({"stray"}), StatusIs(absl::StatusCode::kInvalidArgument,
                                         HasSubstr("\"stray\"")));
}

TEST(FlagsDeathTest, AbslRefusesWhatItCannotParse) {
  EXPECT_EXIT(Parse({"--backend=mpi"}).IgnoreError(),
              ::testing::ExitedWithCode(1),
              "expected auto, local, shared_memory or gloo");
  EXPECT_EXIT(Parse({"--device=tpu"}).IgnoreError(),
              ::testing::ExitedWithCode(1), "expected cpu or cuda");
  EXPECT_EXIT(Parse({"--offload-kinds=states"}).IgnoreError(),
              ::testing::ExitedWithCode(1), "\"states\" is none of");
  EXPECT_EXIT(Parse({"--layer=3"}).IgnoreError(), ::testing::ExitedWithCode(1),
              "layer");
}

}  // namespace
}  // namespace gpt
