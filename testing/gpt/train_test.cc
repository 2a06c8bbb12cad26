// Runs the program as a user does. It is this test's runfile testing/gpt/train,
// below the directory that the test starts in.
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "comm/launcher/launch_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/gpt/testing/plain_training.h"

namespace gpt {
namespace {

using ::fsdp::Json;
using ::fsdp::comm::kUsageErrorExitCode;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Optimizer;
using ::testing::Pair;
using testing::PlainLosses;
using ::testing::SizeIs;

constexpr char kProgram[] = "testing/gpt/train";
constexpr int kSteps = 10;

// A program that a test runs and listens to; the destructor kills one that
// still runs.
class ChildProcess {
 public:
  // Runs argv[0], a path, with both output streams in one. Ends the test
  // program if that is not possible.
  explicit ChildProcess(std::vector<std::string> argv) {
    int pipe_fds[2];
    FSDP_CHECK(pipe2(pipe_fds, O_CLOEXEC) == 0);
    output_fd_ = pipe_fds[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDERR_FILENO);
    std::vector<char*> pointers;
    pointers.reserve(argv.size() + 1);
    for (std::string& argument : argv) pointers.push_back(&argument[0]);
    pointers.push_back(nullptr);
    FSDP_CHECK(posix_spawn(&pid_, pointers[0], &actions, nullptr,
                           pointers.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(pipe_fds[1]);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() {
    if (pid_ >= 0) {
      Signal(SIGKILL);
      Wait();
    }
    close(output_fd_);
  }

  // Reads until the output has `text`; returns false if it ends without it.
  bool ReadUntil(absl::string_view text) {
    while (!absl::StrContains(output_, text)) {
      if (!ReadSome()) return false;
    }
    return true;
  }
  void Signal(int signal) { kill(pid_, signal); }
  // Waits for the end. Returns the exit code, or 128 + the signal.
  int Wait() {
    while (ReadSome()) {
    }
    int status = 0;
    FSDP_CHECK(waitpid(std::exchange(pid_, -1), &status, 0) > 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  // Returns what has been read so far, all of it after Wait().
  const std::string& output() const { return output_; }

 private:
  bool ReadSome() {
    char buffer[4096];
    ssize_t count = 0;
    do {
      count = read(output_fd_, buffer, sizeof(buffer));
    } while (count < 0 && errno == EINTR);
    if (count <= 0) return false;
    output_.append(buffer, count);
    return true;
  }

  pid_t pid_ = -1;
  int output_fd_ = -1;
  std::string output_;
};

class TrainTest : public ::testing::Test {
 protected:
  TrainTest() { std::filesystem::create_directory(directory_); }
  ~TrainTest() override { std::filesystem::remove_all(directory_); }

  std::string Path(absl::string_view name) const {
    return absl::StrCat(directory_, "/", name);
  }

  // Returns a command line for a model that takes no time.
  static std::vector<std::string> Command(std::vector<std::string> flags) {
    std::vector<std::string> command = {
        kProgram,   "--layers=2",  "--dim=16",    "--heads=2",
        "--seq=12", "--vocab=256", "--batch=2",   "--threads=1",
        "--seed=3", "--steps=10",  "--sample=20", "--warmup=0"};
    command.insert(command.end(), flags.begin(), flags.end());
    return command;
  }

  // Runs the program to its end, which has to be a good one, and returns its
  // --json.
  Json Run(std::vector<std::string> flags) {
    flags.push_back(absl::StrCat("--json=", Path("report.json")));
    ChildProcess train(Command(std::move(flags)));
    const int exit_code = train.Wait();
    EXPECT_EQ(exit_code, 0) << train.output();
    std::stringstream text;
    text << std::ifstream(Path("report.json")).rdbuf();
    absl::StatusOr<Json> json = Json::Parse(text.str());
    EXPECT_OK(json);
    return json.value_or(Json());
  }

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

// The number of threads is the program's, since the bits depend on it.
std::vector<double> Plain(int ranks, Optimizer optimizer) {
  at::set_num_threads(1);
  testing::PlainTraining training{};
  training.model = {/*vocab=*/256, /*dim=*/16, /*layers=*/2, /*heads=*/2,
                    /*seq=*/12};
  training.shape = {/*batch=*/2, /*seq=*/12};
  training.ranks = ranks;
  training.steps = kSteps;
  training.seed = 3;
  training.optimizer = optimizer;
  return PlainLosses(training);
}

class TrainOracleTest
    : public TrainTest,
      public ::testing::WithParamInterface<std::tuple<const char*, int>> {};

TEST_P(TrainOracleTest, LossesAreThoseOfPlainTrainingOnAllBatches) {
  const auto [backend, ranks] = GetParam();
  const Json report = Run({"--data=count", absl::StrCat("--backend=", backend),
                           absl::StrCat("--ranks=", ranks)});
  const std::vector<double> losses = Numbers(report, "losses");
  const std::vector<double> plain = Plain(ranks, Optimizer::kTorch);
  ASSERT_THAT(losses, SizeIs(kSteps));
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(losses[step], plain[step], 1e-5 * plain[step]) << step;
  }
  if (ranks == 1) {
    EXPECT_EQ(losses, Plain(1, Optimizer::kFused)) << "not the same bits";
  }
  // Two blocks and the root are n = 3 units, with 2n - 1 all-gathers and n
  // reduce-scatters a step. A single rank communicates nothing.
  const int communicating = ranks == 1 ? 0 : kSteps;
  EXPECT_EQ(report.Find("all_gathers")->NumberOr(-1), 5 * communicating);
  EXPECT_EQ(report.Find("reduce_scatters")->NumberOr(-1), 3 * communicating);
  EXPECT_THAT(Numbers(report, "peak_rss_mb"),
              AllOf(SizeIs(ranks), Each(Gt(0))));
}

INSTANTIATE_TEST_SUITE_P(All, TrainOracleTest,
                         ::testing::Combine(::testing::Values("local", "gloo"),
                                            ::testing::Values(1, 2, 3, 4)));

TEST_F(TrainTest, GoesOnFromTheInitialParametersOfAnotherRun) {
  const std::string init = Path("init.safetensors");
  const Json first = Run({"--data=count", "--save-init", init});
  // The other seed would make other parameters, were it not for the file.
  const Json second = Run({"--data=count", "--init", init, "--seed=4",
                           "--ranks=3", "--backend=local"});
  const Json third = Run({"--data=count", "--seed=4"});
  const auto loss0 = [](const Json& report) {
    return report.Find("loss0")->NumberOr(0);
  };
  EXPECT_EQ(loss0(first), loss0(second));
  EXPECT_NE(loss0(first), loss0(third));
}

TEST_F(TrainTest, DefaultTextIsThereAndTheModelContinuesIt) {
  ChildProcess train(Command({"--steps=2"}));
  EXPECT_EQ(train.Wait(), 0) << train.output();
  EXPECT_THAT(train.output(),
              AllOf(HasSubstr("step 2/2"), HasSubstr("validation loss"),
                    HasSubstr("as the model continues it")));
}

TEST_F(TrainTest, WithoutShardingNothingIsGathered) {
  const Json report = Run({"--data=count", "--sharding=none", "--ranks=1"});
  EXPECT_EQ(report.Find("impl")->ToString(), "\"none\"");
  EXPECT_EQ(report.Find("all_gathers")->NumberOr(-1), 0);
  EXPECT_EQ(Numbers(report, "losses"), Plain(1, Optimizer::kFused));
}

TEST_F(TrainTest, TrainsAlikeByWhatItChooses) {
  const std::vector<double> plain = Plain(2, Optimizer::kTorch);
  for (const char* backend : {"local", "shared_memory"}) {
    const std::vector<double> losses =
        Numbers(Run({"--data=count", "--auto", "--auto-memory=64MiB",
                     "--ranks=2", absl::StrCat("--backend=", backend)}),
                "losses");
    ASSERT_THAT(losses, SizeIs(kSteps));
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(losses[step], plain[step], 1e-5 * plain[step]) << step;
    }
  }
}

TEST_F(TrainTest, SaysWhatItHasConsidered) {
  ChildProcess train(
      Command({"--data=count", "--auto", "--auto-memory=64MiB"}));
  EXPECT_EQ(train.Wait(), 0) << train.output();
  EXPECT_THAT(train.output(),
              AllOf(HasSubstr("of 64.00 MiB"), HasSubstr("root and 2"),
                    HasSubstr("chosen"), HasSubstr("slower")));
  ChildProcess poor(Command({"--data=count", "--auto", "--auto-memory=4KiB"}));
  EXPECT_NE(poor.Wait(), 0);
  EXPECT_THAT(poor.output(), HasSubstr("combinations of options fits"));
}

TEST_F(TrainTest, EveryStrategyTrainsAlike) {
  const std::vector<double> full = Numbers(Run({"--data=count"}), "losses");
  for (const char* flag : {"--sharding=gradients", "--sharding=optimizer",
                           "--sharding=replicated", "--recompute"}) {
    EXPECT_EQ(Numbers(Run({"--data=count", flag}), "losses"), full) << flag;
  }
}

TEST_F(TrainTest, Bf16LearnsAsWell) {
  const std::vector<double> losses =
      Numbers(Run({"--data=count", "--precision=bf16"}), "losses");
  const std::vector<double> full = Numbers(Run({"--data=count"}), "losses");
  ASSERT_EQ(losses.size(), full.size());
  for (size_t i = 0; i < full.size(); ++i) {
    EXPECT_NEAR(losses[i], full[i], 0.05) << "step " << i;
  }
}

TEST_F(TrainTest, AKilledRunGoesOnFromItsLastFinishedStep) {
  const std::vector<double> unbroken =
      Numbers(Run({"--data=count", "--steps=40"}), "losses");
  const std::vector<std::string> flags = {
      "--data=count",    "--steps=40",
      "--backend=local", "--offload=ssd",
      "--keep=run",      absl::StrCat("--offload-dir=", directory_)};
  for (int kill = 0; kill < 3; ++kill) {
    ChildProcess train(Command(flags));
    ASSERT_TRUE(train.ReadUntil("step ")) << train.output();
    train.Signal(SIGKILL);
    train.Wait();
  }
  // These are the steps that were left, none if the last kill came too late.
  const std::vector<double> rest = Numbers(Run(flags), "losses");
  ASSERT_LE(rest.size(), unbroken.size());
  EXPECT_TRUE(std::equal(rest.rbegin(), rest.rend(), unbroken.rbegin()));
  // Another start of a run that is done takes no step, and says so.
  const Json done = Run(flags);
  EXPECT_THAT(Numbers(done, "losses"), SizeIs(0));
  EXPECT_EQ(*done.Find("step_ms"), Json());
  EXPECT_EQ(done.Find("world")->NumberOr(0), 2);
  ChildProcess again(Command(flags));
  EXPECT_EQ(again.Wait(), 0) << again.output();
  EXPECT_THAT(again.output(), HasSubstr("goes on after step 40"));
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
  for (const char* backend : {"--backend=local", "--backend=gloo"}) {
    const std::vector<double> unbroken =
        Numbers(Run({backend, "--steps=12"}), "losses");
    ASSERT_THAT(unbroken, SizeIs(12));
    const std::string save = absl::StrCat("--save=", Path(backend));
    Run({backend, "--steps=7", "--save-every=3", "--keep-last=2", save});
    EXPECT_THAT(Steps(Path(backend)), ElementsAre("step-6", "step-7"));
    const std::string exported = Path(absl::StrCat(backend, ".export"));
    const Json second =
        Run({backend, "--steps=12", "--resume", save, "--warmup=0",
             absl::StrCat("--export=", exported)});
    EXPECT_EQ(Numbers(second, "losses"),
              std::vector<double>(unbroken.begin() + 7, unbroken.end()));
    EXPECT_TRUE(std::filesystem::exists(exported + "/config.json"));
    // The trained model is where a longer run is after its 12th step; a
    // training of its own takes it up. Both kinds of folder work.
    const Json from_export =
        Run({backend, "--steps=1", absl::StrCat("--init=", exported)});
    const Json from_step =
        Run({backend, "--steps=1",
             absl::StrCat("--init=", Path(backend), "/step-12")});
    EXPECT_THAT(Numbers(from_export, "losses"), SizeIs(1));
    EXPECT_EQ(Numbers(from_export, "losses"), Numbers(from_step, "losses"));
  }
}

TEST_F(TrainTest, ARunThatIsToldToEndSavesFirst) {
  for (const char* backend : {"--backend=local", "--backend=gloo"}) {
    const std::string save = absl::StrCat("--save=", Path(backend));
    ChildProcess train(
        Command({backend, "--data=count", "--steps=1000000", save}));
    ASSERT_TRUE(train.ReadUntil("step 1/")) << train.output();
    train.Signal(SIGTERM);
    EXPECT_EQ(train.Wait(), 128 + SIGTERM) << train.output();
    const std::vector<std::string> steps = Steps(Path(backend));
    ASSERT_THAT(steps, SizeIs(1));
    const std::string step = steps[0].substr(5);
    EXPECT_THAT(train.output(),
                HasSubstr(absl::StrCat(
                    "stopped by signal 15 (SIGTERM) after step ", step,
                    ", of which there is a checkpoint in ", Path(backend))));
    ChildProcess again(Command({backend, "--data=count", "--resume", save,
                                "--steps=" + step, "--seed=7"}));
    EXPECT_EQ(again.Wait(), 0) << again.output();
    EXPECT_THAT(
        again.output(),
        AllOf(HasSubstr("goes on after step " + step),
              HasSubstr("--seed=7: the checkpoint is of a run "
                        "with --seed="),
              Not(HasSubstr("--data")),
              HasSubstr("nothing to train: the checkpoint has step " + step)));
    ChildProcess refused(Command({backend, "--data=count", save}));
    EXPECT_EQ(refused.Wait(), kUsageErrorExitCode);
    EXPECT_THAT(refused.output(), HasSubstr("--resume goes on from it"));
  }
}

TEST_F(TrainTest, WhatRestsOnTheDiskMakesNoDifference) {
  const std::vector<double> losses = Numbers(Run({"--data=count"}), "losses");
  const auto run = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--data=count", "--offload-dir", directory_});
    const Json report = Run(flags);
    EXPECT_EQ(Numbers(report, "losses"), losses) << absl::StrJoin(flags, " ");
    const Json offload = *report.Find("offload");
    EXPECT_THAT(Numbers(offload, "waited_seconds_per_step"), SizeIs(2));
    return std::make_pair(
        offload.Find("optimizer")->Find("ssd")->NumberOr(-1),
        offload.Find("written_per_step")->Find("optimizer")->NumberOr(-1));
  };
  for (const char* flag :
       {"--backend=local", "--backend=gloo", "--sharding=gradients"}) {
    EXPECT_THAT(run({"--offload=ssd", flag}), Pair(Gt(0), Gt(0))) << flag;
  }
  EXPECT_THAT(run({"--offload=ssd", "--memory-budget=1MiB"}), Pair(0, 0))
      << "all of it fits";
  EXPECT_THAT(run({"--offload=cpu"}), Pair(0, 0));
}

TEST_F(TrainTest, ThePlanIsPrintedBeforeTheFirstStep) {
  ChildProcess train(Command({"--data=count", "--offload=ssd",
                              absl::StrCat("--offload-dir=", directory_)}));
  EXPECT_EQ(train.Wait(), 0);
  const std::string& output = train.output();
  EXPECT_THAT(output, AllOf(HasSubstr("buffers for transfers"),
                            HasSubstr("optimizer in scratch file"),
                            HasSubstr("read, per step   parameters")));
  EXPECT_LT(output.find("buffers for transfers"), output.find("step 1/10"));
}

TEST_F(TrainTest, WhatCannotRestWhereItShouldEndsAllRanks) {
  for (const char* backend : {"--backend=local", "--backend=gloo"}) {
    ChildProcess missing(Command({backend, "--data=count", "--offload=ssd",
                                  "--offload-dir=/no/such/disk"}));
    EXPECT_EQ(missing.Wait(), kUsageErrorExitCode);
    EXPECT_THAT(missing.output(), AllOf(HasSubstr("making the store of"),
                                        HasSubstr("/no/such/disk")));
    ChildProcess small(Command(
        {backend, "--data=count", "--offload=ssd", "--memory-budget=1KiB"}));
    EXPECT_EQ(small.Wait(), kUsageErrorExitCode);
    EXPECT_THAT(small.output(),
                HasSubstr("a memory budget of 1024 bytes is too small"));
  }
}

TEST_F(TrainTest, TracesItsLastStepsOnAllRanks) {
  for (const char* backend : {"local", "shared_memory"}) {
    const std::string path = Path("trace.json");
    Run({"--data=count", absl::StrCat("--backend=", backend),
         absl::StrCat("--trace=", path), "--trace-steps=3"});
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    ASSERT_OK_AND_ASSIGN(const Json trace, Json::Parse(text.str()));
    std::vector<std::string> steps;
    for (const Json& event : *trace.Find("traceEvents")->As<Json::Array>()) {
      const std::string name = *event.Find("name")->As<std::string>();
      if (name.rfind("step ", 0) != 0) continue;
      steps.push_back(absl::StrCat(event.Find("pid")->ToString(), " ", name));
    }
    EXPECT_THAT(steps, ElementsAre("0 step 8", "0 step 9", "0 step 10",
                                   "1 step 8", "1 step 9", "1 step 10"));
    EXPECT_THAT(text.str(), AllOf(HasSubstr("\"optimizer\""),
                                  HasSubstr("\"backward blocks.1\"")));
    EXPECT_EQ(absl::StrContains(text.str(), "\"OpenShards root\""),
              absl::string_view(backend) == "shared_memory");
  }
}

TEST_F(TrainTest, EndsOnEveryRankWithTheReason) {
  for (const char* backend : {"--backend=local", "--backend=gloo"}) {
    ChildProcess missing(Command({backend, "--data=/no/such/text"}));
    EXPECT_EQ(missing.Wait(), kUsageErrorExitCode);
    EXPECT_THAT(missing.output(), HasSubstr("/no/such/text"));
    std::ofstream(Path("empty")).flush();
    ChildProcess empty(Command({backend, "--data", Path("empty")}));
    EXPECT_EQ(empty.Wait(), kUsageErrorExitCode);
    EXPECT_THAT(empty.output(), HasSubstr("0 bytes are too few"));
    ChildProcess small(Command({backend, "--vocab=100"}));
    EXPECT_EQ(small.Wait(), kUsageErrorExitCode);
    EXPECT_THAT(small.output(), HasSubstr("--vocab=100 is too small"));
  }
}

TEST_F(TrainTest, FilesToWriteAreTriedBeforeTheTraining) {
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  for (const char* backend : {"--backend=local", "--backend=gloo"}) {
    for (const char* flag : {"--json=", "--trace="}) {
      for (const std::string& path :
           {std::string("/no/such/file"), directory_, Path("fifo")}) {
        // It would never end if it began.
        ChildProcess train(
            Command({backend, "--data=count", "--steps=1000000000",
                     absl::StrCat(flag, path)}));
        EXPECT_EQ(train.Wait(), kUsageErrorExitCode);
        EXPECT_THAT(train.output(), HasSubstr(absl::StrCat("writing ", path)));
      }
    }
  }
  ChildProcess train(
      Command({"--backend=gloo", "--data=count", "--steps=1000000000",
               absl::StrCat("--export=", directory_)}));
  EXPECT_EQ(train.Wait(), kUsageErrorExitCode);
  EXPECT_THAT(train.output(),
              HasSubstr(absl::StrCat(directory_, " is there already")));
}

// Runs the program below a shell that sets what a user may have set.
class TrainUnderShellTest : public TrainTest {
 protected:
  int RunBelow(const std::string& before, const std::string& after,
               std::vector<std::string> flags) {
    ChildProcess shell(
        {"/bin/sh", "-c",
         absl::StrCat(before, "exec ",
                      absl::StrJoin(Command(std::move(flags)), " "), after)});
    const int exit_code = shell.Wait();
    output_ = shell.output();
    return exit_code;
  }

  std::string output_;
};

TEST_F(TrainUnderShellTest, AFullDiskBehindStandardOutputIsAFailure) {
  for (const char* backend : {"--backend=local", "--backend=shared_memory"}) {
    EXPECT_EQ(RunBelow("", " > /dev/full", {"--data=count", backend}), 1);
    EXPECT_THAT(output_, AnyOf(HasSubstr("not all could be printed"),
                               HasSubstr("could not be written: No space")))
        << backend;
  }
}

TEST_F(TrainUnderShellTest, ALimitOnTheSizeOfFilesIsAnErrorThatSaysSo) {
  for (const char* backend : {"--backend=local", "--backend=shared_memory"}) {
    EXPECT_EQ(RunBelow("ulimit -f 8; ", "",
                       {"--data=count", backend, "--offload=ssd",
                        absl::StrCat("--offload-dir=", directory_)}),
              1);
    // Memory that ranks share counts, too.
    EXPECT_THAT(output_, AllOf(AnyOf(HasSubstr("reserve"),
                                     HasSubstr("of shared memory")),
                               HasSubstr("ulimit -f")))
        << backend;
  }
  EXPECT_EQ(
      RunBelow("ulimit -f 1; ", "",
               {"--data=count", "--backend=local", "--trace", Path("trace")}),
      1);
  EXPECT_THAT(output_, HasSubstr("ulimit -f"));
  EXPECT_FALSE(std::filesystem::exists(Path("trace")));
}

// A launcher gets SIGQUIT and SIGUSR1 when ranks have not started, or have
// ended.
TEST_F(TrainTest, QuestionsEndNoLauncher) {
  setenv("GPT_ASK", "1", 1);
  std::vector<std::string> command =
      Command({"--backend=gloo", "--data=count", "--steps=1"});
  command[0] = "testing/gpt/testing/train_with_faults";
  ChildProcess train(std::move(command));
  unsetenv("GPT_ASK");
  EXPECT_EQ(train.Wait(), 0);
  EXPECT_THAT(train.output(),
              AllOf(HasSubstr("[0] the launcher is ready for questions"),
                    HasSubstr("[1] the launcher is ready for questions"),
                    HasSubstr("\nthe launcher has survived\n")));
}

TEST_F(TrainTest, InterruptEndsAllRanksBetweenTwoSteps) {
  for (const char* backend : {"--backend=local", "--backend=gloo"}) {
    ChildProcess train(Command({backend, "--data=count", "--steps=1000000"}));
    ASSERT_TRUE(train.ReadUntil("step 1/")) << train.output();
    train.Signal(SIGINT);
    EXPECT_EQ(train.Wait(), 128 + SIGINT) << train.output();
    EXPECT_THAT(train.output(),
                AllOf(HasSubstr("stopped by signal 2 (SIGINT) after step"),
                      HasSubstr("training loss")));
  }
}

}  // namespace
}  // namespace gpt
