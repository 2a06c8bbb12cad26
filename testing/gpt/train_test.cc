// Runs the program as a user does. It is this test's runfile testing/gpt/train,
// below the directory that the test starts in.
#include <ATen/Parallel.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/output_file.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "comm/launcher/launch_options.h"
#include "testing/gpt/testing/plain_training.h"

namespace gpt {
namespace {

using ::fsdp::Json;
using ::fsdp::comm::kUsageErrorExitCode;
using ::fsdp::testing::ChildProcess;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;
using testing::Optimizer;
using ::testing::Pair;
using testing::PlainLosses;
using ::testing::SizeIs;

constexpr char kProgram[] = "testing/gpt/train";
constexpr int kSteps = 10;

class TrainTest : public ::testing::Test {
 protected:
  TrainTest() { std::filesystem::create_directory(directory_); }
  ~TrainTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(absl::string_view name) const {
    return absl::StrCat(directory_, "/", name);
  }

  // Returns a command line for a model that takes no time.
  static std::string Command(absl::string_view flags) {
    return absl::StrCat(kProgram,
                        " --layers=2 --dim=16 --heads=2 --seq=12 --vocab=256 "
                        "--batch=2 --threads=1 --seed=3 --steps=10 "
                        "--warmup=0 ",
                        flags);
  }

  // Runs the program to its end, which has to be this one, and returns what it
  // has printed.
  static std::string OutputOf(absl::string_view flags, int exit_code = 0) {
    ChildProcess train(Command(flags));
    EXPECT_EQ(train.Wait(), exit_code) << flags << "\n" << train.output();
    return train.output();
  }

  // Runs the program to a good end, and returns its --json.
  Json Run(absl::string_view flags) const {
    OutputOf(absl::StrCat(flags, " --json=", Path("report.json")));
    const absl::StatusOr<std::string> text =
        fsdp::ReadRegularFile(Path("report.json"));
    EXPECT_OK(text);
    absl::StatusOr<Json> json = Json::Parse(text.value_or(""));
    EXPECT_OK(json);
    return json.value_or(Json());
  }
  std::vector<double> Losses(absl::string_view flags) const;

  const std::string directory_ =
      absl::StrCat(::testing::TempDir(), "/train_test.", getpid());
};

std::vector<double> Numbers(const Json& report, absl::string_view key) {
  std::vector<double> numbers;
  const Json* list = report.Find(key);
  if (list == nullptr || list->As<Json::Array>() == nullptr) return numbers;
  for (const Json& number : *list->As<Json::Array>()) {
    numbers.push_back(number.NumberOr(-1));
  }
  return numbers;
}

std::vector<double> TrainTest::Losses(absl::string_view flags) const {
  return Numbers(Run(flags), "losses");
}

// The number of threads is the program's, since the bits depend on it.
std::vector<double> Plain(int ranks, Optimizer optimizer) {
  at::set_num_threads(1);
  return PlainLosses({{/*vocab=*/256, /*dim=*/16, /*layers=*/2, /*heads=*/2,
                       /*seq=*/12},
                      {/*batch=*/2, /*seq=*/12},
                      ranks,
                      kSteps,
                      /*seed=*/3,
                      optimizer});
}

void ExpectNear(const std::vector<double>& losses,
                const std::vector<double>& expected, double relative) {
  ASSERT_EQ(losses.size(), expected.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], expected[i], relative * expected[i]) << i;
  }
}

class TrainOracleTest
    : public TrainTest,
      public ::testing::WithParamInterface<std::tuple<const char*, int>> {};

TEST_P(TrainOracleTest, LossesAreThoseOfPlainTrainingOnAllBatches) {
  const auto [backend, ranks] = GetParam();
  const Json report =
      Run(absl::StrCat("--backend=", backend, " --ranks=", ranks));
  const std::vector<double> losses = Numbers(report, "losses");
  ASSERT_THAT(losses, SizeIs(kSteps));
  ExpectNear(losses, Plain(ranks, Optimizer::kTorch), 1e-5);
  if (ranks == 1) {
    EXPECT_EQ(losses, Plain(1, Optimizer::kFused)) << "not the same bits";
  }
  // Two blocks and the root are n = 3 units, with 2n - 1 all-gathers and n
  // reduce-scatters a step. A single rank communicates nothing, and ranks that
  // share memory look at each other's shards.
  const int communicating = ranks == 1 ? 0 : kSteps;
  const bool gathers = absl::string_view(backend) == "gloo";
  EXPECT_EQ(report.Find("all_gathers")->NumberOr(-1),
            gathers ? 5 * communicating : 0);
  EXPECT_EQ(report.Find("reduce_scatters")->NumberOr(-1), 3 * communicating);
  EXPECT_THAT(Numbers(report, "peak_rss_mb"),
              AllOf(SizeIs(ranks), ::testing::Each(Gt(0))));
}

INSTANTIATE_TEST_SUITE_P(All, TrainOracleTest,
                         ::testing::Combine(::testing::Values("shared_memory",
                                                              "gloo"),
                                            ::testing::Values(1, 2, 3, 4)));

TEST_F(TrainTest, GoesOnFromTheInitialParametersOfAnotherRun) {
  const std::string init = Path("init");
  // The other seed would make other parameters, were it not for the file.
  const Json first = Run("--save-init " + init);
  const Json second = Run("--seed=4 --ranks=3 --init " + init);
  const Json third = Run("--seed=4");
  EXPECT_EQ(*first.Find("loss0"), *second.Find("loss0"));
  EXPECT_FALSE(*first.Find("loss0") == *third.Find("loss0"));
}

TEST_F(TrainTest, WithoutShardingNothingIsGathered) {
  const Json report = Run("--sharding=none --ranks=1");
  EXPECT_EQ(report.Find("impl")->ToString(), "\"none\"");
  EXPECT_EQ(report.Find("all_gathers")->NumberOr(-1), 0);
  EXPECT_EQ(Numbers(report, "losses"), Plain(1, Optimizer::kFused));
}

TEST_F(TrainTest, TrainsAlikeByWhatItChoosesAndSaysWhatItHasConsidered) {
  const std::string flags = "--auto --auto-memory=";
  ExpectNear(Losses(flags + "64MiB"), Plain(2, Optimizer::kTorch), 1e-5);
  EXPECT_THAT(OutputOf(flags + "64MiB"),
              AllOf(HasSubstr("of 64.00 MiB"), HasSubstr("root and 2"),
                    HasSubstr("chosen"), HasSubstr("slower")));
  ChildProcess poor(Command(flags + "4KiB"));
  EXPECT_NE(poor.Wait(), 0);
  EXPECT_THAT(poor.output(), HasSubstr("combinations of options fits"));
}

TEST_F(TrainTest, AKilledRunGoesOnFromItsLastFinishedStep) {
  const std::vector<double> unbroken = Losses("--ranks=1 --steps=40");
  const std::string flags = absl::StrCat(
      "--ranks=1 --steps=40 --offload=ssd --keep=run --offload-dir=",
      directory_);
  for (int kill = 0; kill < 3; ++kill) {
    ChildProcess train(Command(flags));
    ASSERT_TRUE(train.ReadUntil("step ")) << train.output();
    train.Signal(SIGKILL);
    train.Wait();
  }
  // These are the steps that were left, none if the last kill came too late.
  const std::vector<double> rest = Losses(flags);
  ASSERT_LE(rest.size(), unbroken.size());
  EXPECT_TRUE(std::equal(rest.rbegin(), rest.rend(), unbroken.rbegin()));
  // Another start of a run that is done takes no step, and says so.
  const Json done = Run(flags);
  EXPECT_THAT(Numbers(done, "losses"), SizeIs(0));
  EXPECT_EQ(*done.Find("step_ms"), Json());
  EXPECT_EQ(done.Find("world")->NumberOr(0), 1);
  EXPECT_THAT(OutputOf(flags), HasSubstr("goes on after step 40"));
}

// Returns what --save has made, sorted.
std::vector<std::string> Steps(const std::string& folder) {
  std::vector<std::string> steps;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name.rfind("step-", 0) == 0) steps.push_back(name);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

TEST_F(TrainTest, GoesOnFromItsNewestCheckpoint) {
  const std::vector<double> unbroken = Losses("--steps=12");
  ASSERT_THAT(unbroken, SizeIs(12));
  const std::string save = "--save=" + Path("run");
  Run(save + " --steps=7 --save-every=3 --keep-last=2");
  EXPECT_THAT(Steps(Path("run")), ElementsAre("step-6", "step-7"));
  const std::string exported = Path("export");
  EXPECT_EQ(
      Losses(save + " --steps=12 --resume --warmup=0 --export=" + exported),
      std::vector<double>(unbroken.begin() + 7, unbroken.end()));
  EXPECT_TRUE(std::filesystem::exists(exported + "/config.json"));
  // The trained model is where a longer run is after its 12th step; a
  // training of its own takes it up. Both kinds of folder work.
  const std::string init = "--steps=1 --init=";
  const std::vector<double> from_export = Losses(init + exported);
  EXPECT_THAT(from_export, SizeIs(1));
  EXPECT_EQ(from_export, Losses(init + Path("run") + "/step-12"));
}

TEST_F(TrainTest, ARunThatIsToldToEndSavesFirst) {
  const std::string flags = "--save=" + Path("run");
  ChildProcess train(Command(flags + " --steps=1000000"));
  ASSERT_TRUE(train.ReadUntil("step 1/")) << train.output();
  train.Signal(SIGTERM);
  EXPECT_EQ(train.Wait(), 128 + SIGTERM) << train.output();
  const std::vector<std::string> steps = Steps(Path("run"));
  ASSERT_THAT(steps, SizeIs(1));
  const std::string step = steps[0].substr(5);
  EXPECT_THAT(train.output(),
              HasSubstr(absl::StrCat(
                  "stopped by signal 15 (SIGTERM) after step ", step,
                  ", of which there is a checkpoint in ", Path("run"))));
  EXPECT_THAT(
      OutputOf(flags + " --resume --seed=7 --steps=" + step),
      AllOf(HasSubstr("goes on after step " + step),
            HasSubstr("--seed=7: the checkpoint is of a run with --seed="),
            ::testing::Not(HasSubstr("--seq")),
            HasSubstr("nothing to train: the checkpoint has step " + step)));
  EXPECT_THAT(OutputOf(flags, kUsageErrorExitCode),
              HasSubstr("--resume goes on from it"));
}

TEST_F(TrainTest, WhatRestsOnTheDiskMakesNoDifference) {
  const std::vector<double> losses = Losses("");
  const auto run = [&](const std::string& flags) {
    const Json report = Run(absl::StrCat(flags, " --offload-dir ", directory_));
    EXPECT_EQ(Numbers(report, "losses"), losses) << flags;
    const Json offload = *report.Find("offload");
    EXPECT_THAT(Numbers(offload, "waited_seconds_per_step"), SizeIs(2));
    return std::make_pair(
        offload.Find("optimizer")->Find("ssd")->NumberOr(-1),
        offload.Find("written_per_step")->Find("optimizer")->NumberOr(-1));
  };
  for (const std::string flag : {"--backend=gloo", "--sharding=gradients"}) {
    EXPECT_THAT(run("--offload=ssd " + flag), Pair(Gt(0), Gt(0))) << flag;
  }
  EXPECT_THAT(run("--offload=ssd --memory-budget=1MiB"), Pair(0, 0))
      << "all of it fits";
  EXPECT_THAT(run("--offload=cpu"), Pair(0, 0));
}

TEST_F(TrainTest, ThePlanIsPrintedBeforeTheFirstStep) {
  const std::string output =
      OutputOf(absl::StrCat("--offload=ssd --offload-dir=", directory_));
  EXPECT_THAT(output, AllOf(HasSubstr("buffers for transfers"),
                            HasSubstr("optimizer in scratch file"),
                            HasSubstr("\"read_per_step\": {")));
  EXPECT_LT(output.find("buffers for transfers"), output.find("step 1/10"));
}

TEST_F(TrainTest, TracesItsLastStepsOnAllRanks) {
  for (const char* backend : {"gloo", "shared_memory"}) {
    const std::string path = Path("trace.json");
    Run(absl::StrCat("--trace-steps=3 --backend=", backend, " --trace=", path));
    ASSERT_OK_AND_ASSIGN(const std::string text, fsdp::ReadRegularFile(path));
    ASSERT_OK_AND_ASSIGN(const Json trace, Json::Parse(text));
    std::vector<std::string> steps;
    for (const Json& event : *trace.Find("traceEvents")->As<Json::Array>()) {
      const std::string name = *event.Find("name")->As<std::string>();
      if (name.rfind("step ", 0) != 0) continue;
      steps.push_back(absl::StrCat(event.Find("pid")->ToString(), " ", name));
    }
    EXPECT_THAT(steps, ElementsAre("0 step 8", "0 step 9", "0 step 10",
                                   "1 step 8", "1 step 9", "1 step 10"));
    EXPECT_THAT(text, AllOf(HasSubstr("\"optimizer\""),
                            HasSubstr("\"backward blocks.1\"")));
    EXPECT_EQ(absl::StrContains(text, "\"OpenShards root\""),
              absl::string_view(backend) == "shared_memory");
  }
}

TEST_F(TrainTest, WhatCannotBeEndsEveryRankWithTheReasonBeforeTheTraining) {
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  std::vector<std::pair<std::string, std::string>> cases = {
      {"--offload=ssd --offload-dir=/no/such/disk", "making the store of"},
      {"--offload=ssd --offload-dir=/no/such/disk", "/no/such/disk"},
      {"--offload=ssd --memory-budget=1KiB",
       "a memory budget of 1024 bytes is too small"},
      {"--export=" + directory_, directory_ + " is there already"},
      {"--export=/no/such/folder/model", "/no/such/folder"},
      {"--sharding=none --export=model", "--export with --sharding=none and 2"},
  };
  for (const std::string flag : {"--json=", "--trace="}) {
    for (const std::string& path :
         {std::string("/no/such/file"), directory_, Path("fifo")}) {
      cases.emplace_back(flag + path, "writing " + path);
    }
  }
  for (const auto& [flags, why] : cases) {
    // It would never end if it began.
    EXPECT_THAT(OutputOf("--steps=1000000000 " + flags, kUsageErrorExitCode),
                HasSubstr(why));
  }
}

// Runs the program below a shell that sets what a user may have set.
std::string OutputBelow(absl::string_view before, absl::string_view command,
                        absl::string_view after) {
  ChildProcess train(command, before, after);
  EXPECT_EQ(train.Wait(), 1);
  return train.output();
}

TEST_F(TrainTest, ALimitOnTheSizeOfFilesIsAnErrorThatSaysSo) {
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
  GTEST_SKIP() << "ThreadSanitizer maps a file above the limit";
#endif
#endif
  // Memory that ranks share counts, too.
  for (const std::string ranks : {"--ranks=1 ", "--ranks=2 "}) {
    EXPECT_THAT(
        OutputBelow(
            "ulimit -f 8; ",
            Command(ranks + "--offload=ssd --offload-dir=" + directory_), ""),
        AllOf(AnyOf(HasSubstr("reserve"), HasSubstr("of shared memory")),
              HasSubstr("ulimit -f")))
        << ranks;
  }
  EXPECT_THAT(OutputBelow("ulimit -f 1; ",
                          Command("--ranks=1 --trace " + Path("trace")), ""),
              HasSubstr("ulimit -f"));
  EXPECT_FALSE(std::filesystem::exists(Path("trace")));
}

}  // namespace
}  // namespace gpt
