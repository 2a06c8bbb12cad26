// Runs the program as a user does. It is this test's runfile
// examples/gpt/train, below the directory that the test starts in.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "checkpoint/model_files.h"
#include "comm/launcher/launch_options.h"
#include "examples/gpt/model.h"
#include "fsdp/deferred/deferred_init.h"

namespace gpt {
namespace {

using ::fsdp::comm::kUsageErrorExitCode;
using ::fsdp::testing::ChildProcess;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr GptConfig kModel = {/*layers=*/2, /*width=*/64, /*seq=*/16};
constexpr int64_t kRows = 2;
constexpr int64_t kSteps = 40;
constexpr double kRate = 0.01;

// Returns the losses by step, as printed: "2.7183".
std::map<int64_t, std::string> LossesIn(absl::string_view output) {
  std::map<int64_t, std::string> losses;
  for (absl::string_view line : absl::StrSplit(output, '\n')) {
    absl::ConsumePrefix(&line, "[0] ");  // of one rank of several
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" /"), absl::SkipEmpty());
    int64_t step = 0;
    if (words.size() > 4 && words[0] == "step" && words[3] == "loss" &&
        absl::SimpleAtoi(words[1], &step)) {
      losses[step] = words[4];
    }
  }
  return losses;
}

class TrainTest : public ::testing::Test {
 protected:
  TrainTest() {
    std::filesystem::create_directories(folder_);
    for (int i = 0; i < 200; ++i) {
      absl::StrAppend(&text_, "the square of ", i, " is ", i * i, "\n");
    }
    std::ofstream(Path("text")) << text_;
  }
  ~TrainTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const {
    return absl::StrCat(folder_, "/", name);
  }
  // Returns a command line for a model that takes no time.
  std::string Command(int ranks, int64_t steps,
                      const std::string& more = "") const {
    return absl::StrCat(
        "env OMP_NUM_THREADS=1 examples/gpt/train --layers=2 --width=64 "
        "--seq=16 --batch=2 --lr=0.01 --data=",
        Path("text"), " --ranks=", ranks, " --steps=", steps, " ", more);
  }
  // Returns the rows that `ranks` ranks train on in a step, seq + 1 bytes each.
  torch::Tensor Rows(int64_t step, int ranks) const {
    torch::manual_seed(step);
    const auto places = static_cast<int64_t>(text_.size()) - kModel.seq;
    const torch::Tensor starts = torch::randint(places, {ranks * kRows});
    torch::Tensor rows =
        torch::empty({ranks * kRows, kModel.seq + 1}, torch::kLong);
    for (int64_t row = 0; row < rows.size(0); ++row) {
      for (int64_t i = 0; i <= kModel.seq; ++i) {
        rows[row][i] = text_[starts[row].item<int64_t>() + i];
      }
    }
    return rows;
  }

  std::string text_;
  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/train_test.", getpid());
};

torch::Tensor LossOf(const Gpt& model, const torch::Tensor& rows) {
  const torch::Tensor logits = Gpt(model)->forward(rows.slice(1, 0, -1));
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              rows.slice(1, 1).flatten());
}

struct Plain {
  Gpt model{nullptr};
  std::vector<double> losses;
};

// Trains by LibTorch alone, on the rows of all ranks as one batch.
Plain TrainPlain(const std::function<torch::Tensor(int64_t)>& rows) {
  Plain plain;
  torch::manual_seed(0);
  {
    const fsdp::DeferredInit deferred;  // its values are others than without it
    plain.model = Gpt(kModel);
  }
  FSDP_CHECK(fsdp::Materialize(*plain.model).ok());
  torch::optim::AdamW optimizer(plain.model->parameters(), kRate);
  constexpr int64_t kWarmUp = kSteps / 20;
  for (int64_t step = 0; step < kSteps; ++step) {
    const double cosine = std::cos(M_PI * static_cast<double>(step - kWarmUp) /
                                   (kSteps - kWarmUp));
    const double part =
        step < kWarmUp ? (step + 1.0) / kWarmUp : 0.1 + 0.9 * (1 + cosine) / 2;
    optimizer.param_groups()[0].options().set_lr(kRate * part);
    const torch::Tensor loss = LossOf(plain.model, rows(step + 1));
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(plain.model->parameters(), 1.0);
    optimizer.step();
    plain.losses.push_back(loss.item<double>());
  }
  return plain;
}

class OracleTest : public TrainTest,
                   public ::testing::WithParamInterface<int> {};

TEST_P(OracleTest, LossesAndTheExportAreThoseOfPlainLibTorch) {
  const int ranks = GetParam();
  ChildProcess program(
      Command(ranks, kSteps, absl::StrCat("--export=", Path("export"))));
  ASSERT_EQ(program.Wait(), 0) << program.output();
  const Plain plain =
      TrainPlain([&](int64_t step) { return Rows(step, ranks); });
  const auto losses = LossesIn(program.output());
  ASSERT_THAT(losses, SizeIs(kSteps)) << program.output();
  for (int64_t step = 1; step <= kSteps; ++step) {
    EXPECT_NEAR(std::stod(losses.at(step)), plain.losses[step - 1], 1e-3)
        << step;
  }
  EXPECT_LT(plain.losses.back(), plain.losses.front() - 1);
  EXPECT_THAT(program.output(), HasSubstr("--- as the model goes on ---"));

  Gpt exported(kModel);
  ASSERT_OK(fsdp::checkpoint::LoadModel(Path("export"), *exported));
  const torch::Tensor rows = Rows(kSteps + 1, ranks);
  EXPECT_NEAR(LossOf(exported, rows).item<double>(),
              LossOf(plain.model, rows).item<double>(), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Ranks, OracleTest, ::testing::Values(1, 2, 3));

TEST_F(TrainTest, ARunThatIsStoppedAndGoesOnHasTheLossesOfAnUnbrokenOne) {
  constexpr int64_t kManySteps = 1000;
  ChildProcess unbroken(Command(2, kManySteps));
  ASSERT_EQ(unbroken.Wait(), 0) << unbroken.output();
  ASSERT_THAT(LossesIn(unbroken.output()), SizeIs(50));  // every 20th step

  const std::string saved =
      Command(2, kManySteps, absl::StrCat("--save=", Path("run"), " --resume"));
  ChildProcess stopped(saved);
  ASSERT_TRUE(stopped.ReadUntil("step 100/")) << stopped.output();
  stopped.Signal(SIGTERM);
  ASSERT_EQ(stopped.Wait(), 128 + SIGTERM) << stopped.output();
  ChildProcess resumed(saved);
  ASSERT_EQ(resumed.Wait(), 0) << resumed.output();
  EXPECT_THAT(resumed.output(), HasSubstr("goes on after step 1"));
  auto losses = LossesIn(stopped.output());
  const auto rest = LossesIn(resumed.output());
  losses.insert(rest.begin(), rest.end());
  EXPECT_EQ(losses, LossesIn(unbroken.output()));

  ChildProcess again(
      Command(2, kManySteps, absl::StrCat("--save=", Path("run"))));
  EXPECT_EQ(again.Wait(), kUsageErrorExitCode);
  EXPECT_THAT(again.output(), HasSubstr("has checkpoints: go on from them by"));
}

TEST_F(TrainTest, OffloadChangesNoLoss) {
  ChildProcess in_memory(Command(2, kSteps));
  ChildProcess in_files(Command(2, kSteps, "--offload=ssd"));
  ASSERT_EQ(in_memory.Wait(), 0) << in_memory.output();
  ASSERT_EQ(in_files.Wait(), 0) << in_files.output();
  EXPECT_THAT(LossesIn(in_memory.output()), SizeIs(kSteps));
  EXPECT_EQ(LossesIn(in_files.output()), LossesIn(in_memory.output()));
}

TEST_F(TrainTest, LearnsInBFloat16) {
  ChildProcess program(Command(2, kSteps, "--precision=bf16"));
  ASSERT_EQ(program.Wait(), 0) << program.output();
  const auto losses = LossesIn(program.output());
  EXPECT_LT(std::stod(losses.at(kSteps)), std::stod(losses.at(1)) - 1);
}

TEST_F(TrainTest, RefusesFlagsThatCannotBe) {
  const std::vector<std::string> refused = {
      "--steps=0",
      "--batch=-1",
      "--seq=0",
      "--layers=0",
      "--width=100",
      "--lr=nan",
      "--precision=fp8",
      "--offload=tape",
      "--device=abacus",
      "--ranks=0",
      "--save_every=5",
      "--resume",
      "--data=/nowhere",
      "--seq=100000",
      "--export=/",
      "--device=cuda",
      "--export=/tmp/both --save=/tmp/both"};
  for (const std::string& flag : refused) {
    ChildProcess program(Command(2, kSteps, flag));
    EXPECT_EQ(program.Wait(), kUsageErrorExitCode) << program.output();
    const std::string name = flag.substr(0, flag.find('='));
    EXPECT_THAT(program.output(), HasSubstr(name));
    EXPECT_THAT(program.output(), ::testing::Not(HasSubstr("loss")));
  }
}

}  // namespace
}  // namespace gpt
