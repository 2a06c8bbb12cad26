#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <signal.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "checkpoint/checkpointer.h"
#include "comm/launcher/launch_options.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunRefusedRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::FreePath;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kDim = 5;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr absl::StatusCode kRefused = absl::StatusCode::kFailedPrecondition;

// What a rank of a test does differently from an ordinary run.
struct Plan {
  int64_t steps = 6;
  RunGuardOptions guard;
  std::string folder;  // of checkpoints; empty: none
  int64_t keep_last = 0;
  // Before this step the last element of this parameter becomes infinite.
  int64_t broken_step = 0;
  std::string broken = "head.bias";
  bool breaks_gradient = false;  // instead; after its backward
  double loss_instead = 0;       // for rank 1 in broken_step; 0: its own
  double rate = 0.01;
};

// Is one rank's run, written by hand as the header has it.
class GuardedRun {
 public:
  GuardedRun(const Plan& plan, Communicator& ranks)
      : plan_(plan), ranks_(ranks) {}

  absl::Status Train() {
    FSDP_ASSIGN_OR_RETURN(model_, FullyShard(MakeNet(kDim, 2, /*seed=*/7),
                                             Unowned(ranks_), BlockUnits()));
    optimizer_ = std::make_unique<torch::optim::SGD>(
        model_->Parameters(), torch::optim::SGDOptions(plan_.rate));
    TrainingRun run;
    run.model = model_.get();
    run.optimizer = optimizer_.get();
    run.random_state = false;  // threads have one generator together
    std::unique_ptr<Checkpointer> checkpoints;
    int64_t first = 0;
    if (!plan_.folder.empty()) {
      CheckpointerOptions options;
      if (plan_.keep_last > 0) options.keep_last = plan_.keep_last;
      FSDP_ASSIGN_OR_RETURN(
          checkpoints,
          Checkpointer::Open(plan_.folder, Unowned(ranks_), options));
      FSDP_ASSIGN_OR_RETURN(const auto loaded, checkpoints->LoadLatest(run));
      first = loaded.value_or(0);
    }
    RunGuard guard(Unowned(ranks_), checkpoints.get(), &run, plan_.guard);
    for (int64_t step = first + 1; step <= plan_.steps; ++step) {
      FSDP_RETURN_IF_ERROR(Step(step, guard));
      FSDP_RETURN_IF_ERROR(guard.EndStep(step, step == plan_.steps));
      last_step = step;
    }
    return absl::OkStatus();
  }

  std::vector<double> losses;  // of this rank, by step
  int64_t last_step = 0;       // the last one that has ended
  std::vector<int64_t> left_out;

 private:
  absl::Status Step(int64_t step, RunGuard& guard) {
    const bool breaks = step == plan_.broken_step;
    if (breaks && !plan_.breaks_gradient) Break(/*gradient=*/false);
    const at::Tensor x = ::fsdp::testing::Rows(
        static_cast<int>(step) * 24 + ranks_.rank() * 3, 3, kDim);
    const at::Tensor loss = ::fsdp::testing::Loss(model_->forward(x), x);
    FSDP_RETURN_IF_ERROR(model_->Backward(loss));
    if (breaks && plan_.breaks_gradient) Break(/*gradient=*/true);
    FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                          model_->ClipGradNorm(kInfinity));
    losses.push_back(loss.item<double>());
    const bool is_other =
        breaks && plan_.loss_instead != 0 && ranks_.rank() == 1;
    FSDP_ASSIGN_OR_RETURN(
        const bool may_step,
        guard.MayStep(step, is_other ? plan_.loss_instead : losses.back(),
                      norm.item<double>()));
    if (may_step) {
      optimizer_->step();
    } else {
      left_out.push_back(step);
    }
    optimizer_->zero_grad();
    return absl::OkStatus();
  }

  void Break(bool gradient) {
    if (plan_.loss_instead != 0) return;
    for (const TensorRange& named : model_->Ranges()) {
      if (named.name != plan_.broken || named.values.numel() == 0) continue;
      const c10::NoGradGuard no_grad;
      const at::Tensor which = gradient ? named.values.grad() : named.values;
      which.narrow(0, which.numel() - 1, 1).fill_(kInfinity);
    }
  }

  const Plan& plan_;
  Communicator& ranks_;
  FullyShardedDataParallel<::fsdp::testing::NetImpl> model_{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

std::vector<int64_t> StepsIn(const std::string& folder) {
  const auto checkpoints = Checkpointer::Open(folder, /*ranks=*/nullptr);
  EXPECT_OK(checkpoints);
  const auto steps = (*checkpoints)->Steps();
  EXPECT_OK(steps);
  return *steps;
}

// Trains on so many ranks and returns how each has ended.
std::vector<absl::Status> Train(
    const Plan& plan, int ranks,
    std::vector<std::unique_ptr<GuardedRun>>* runs) {
  runs->clear();
  runs->resize(ranks);
  return RunRefusedRanks(ranks, [&](Communicator& rank) {
    auto& run = (*runs)[rank.rank()];
    run = std::make_unique<GuardedRun>(plan, rank);
    return run->Train();
  });
}

// All ranks name the same, and the step is in no checkpoint.
TEST(RunGuardTest, WhatIsNotFiniteEndsTheRunBeforeItsStep) {
  struct Case {
    Plan plan;
    std::vector<int> ranks;
    std::string first;
    std::string then;
  };
  std::vector<Case> cases(2);
  cases[0] = {{},
              {1, 2, 3},
              "step 4: the loss of rank ",
              "head.bias is the first parameter with a value"};
  cases[0].plan.broken_step = 4;
  cases[1] = {{},
              {1, 3},
              "step 2: the norm of the gradients is inf",
              "all parameters are finite, and head.bias is the first one with "
              "a gradient that is not"};
  cases[1].plan.broken_step = 2;
  cases[1].plan.breaks_gradient = true;
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    cases.push_back({{},
                     {3},
                     absl::StrCat("the loss of rank 1 is ", bad),
                     "all parameters and gradients are finite. This step is "
                     "not in a checkpoint."});
    cases.back().plan.broken_step = 3;
    cases.back().plan.loss_instead = bad;
  }
  for (Case& one : cases) {
    for (const int ranks : one.ranks) {
      one.plan.folder = FreePath("broken");
      one.plan.keep_last = 1;
      one.plan.guard.save_every = 1;
      std::vector<std::unique_ptr<GuardedRun>> runs;
      const std::vector<absl::Status> ends = Train(one.plan, ranks, &runs);
      EXPECT_THAT(ends, Each(StatusIs(kRefused, AllOf(HasSubstr(one.first),
                                                      HasSubstr(one.then)))));
      for (const absl::Status& end : ends) EXPECT_EQ(end, ends[0]);
      const int64_t last = one.plan.broken_step - 1;
      for (const auto& run : runs) EXPECT_EQ(run->last_step, last);
      EXPECT_THAT(StepsIn(one.plan.folder), ElementsAre(last));
    }
  }
}

TEST(RunGuardTest, StepsMayBeLeftOut) {
  Plan plan;
  plan.broken_step = 3;
  plan.loss_instead = kNan;
  plan.guard.max_skipped = 1;
  std::vector<std::unique_ptr<GuardedRun>> runs;
  EXPECT_THAT(Train(plan, 2, &runs), Each(StatusIs(absl::StatusCode::kOk, "")));
  EXPECT_EQ(runs[0]->left_out, std::vector<int64_t>{3});
  EXPECT_EQ(runs[1]->left_out, std::vector<int64_t>{3});
  EXPECT_EQ(runs[0]->last_step, 6);
}

TEST(RunGuardTest, OnlySoManyInARowAreLeftOut) {
  Plan plan;
  plan.broken_step = 2;  // and in every step after it, as the value stays
  plan.guard.max_skipped = 2;
  std::vector<std::unique_ptr<GuardedRun>> runs;
  EXPECT_THAT(Train(plan, 2, &runs),
              Each(StatusIs(kRefused, HasSubstr("step 4: "))));
  EXPECT_EQ(runs[0]->left_out, (std::vector<int64_t>{2, 3}));
}

// The loss and the gradients are finite: tanh of infinity is 1.
TEST(RunGuardTest, AModelThatIsNotFiniteIsNotSaved) {
  Plan plan;
  plan.folder = FreePath("not_saved");
  plan.keep_last = 1;
  plan.guard.save_every = 2;
  plan.broken = "blocks.1.fc.bias";
  plan.broken_step = 3;
  std::vector<std::unique_ptr<GuardedRun>> runs;
  EXPECT_THAT(
      Train(plan, 2, &runs),
      Each(StatusIs(kRefused, AllOf(HasSubstr("step 4: blocks.1.fc.bias is "),
                                    HasSubstr("this step is not saved"),
                                    HasSubstr("If it was so from the start"),
                                    ::testing::Not(HasSubstr("optimizer"))))));
  EXPECT_EQ(StepsIn(plan.folder), std::vector<int64_t>{2});
}

// This holds for any rank and any step; the run that goes on has the losses of
// one that was never stopped.
TEST(RunGuardTest, ASignalToOneRankStopsAllAfterTheSameStep) {
  for (const int ranks : {1, 2, 3}) {
    Plan unbroken;
    std::vector<std::unique_ptr<GuardedRun>> whole;
    EXPECT_THAT(Train(unbroken, ranks, &whole),
                Each(StatusIs(absl::StatusCode::kOk, "")));
    for (int64_t step = 1; step < unbroken.steps; ++step) {
      const int victim = static_cast<int>(step) % ranks;
      Plan plan;
      plan.folder = FreePath("guard_3");
      std::vector<std::unique_ptr<GuardedRun>> runs(ranks);
      const std::vector<absl::Status> ends =
          RunRefusedRanks(ranks, [&](Communicator& rank) {
            Plan mine = plan;
            int64_t asked = 0;  // counts up once a step
            if (rank.rank() == victim) {
              mine.guard.signal = [&asked, step] {
                return ++asked >= step ? SIGUSR1 : 0;
              };
            } else {
              mine.guard.signal = [] { return 0; };
            }
            auto& run = runs[rank.rank()];
            run = std::make_unique<GuardedRun>(mine, rank);
            absl::Status end = run->Train();
            EXPECT_EQ(comm::ExitCodeOf(end), 128 + SIGUSR1);
            return end;
          });
      EXPECT_THAT(ends,
                  Each(StatusIs(absl::StatusCode::kCancelled,
                                HasSubstr(absl::StrCat(
                                    "after step ", step,
                                    ", of which there is a checkpoint in ",
                                    plan.folder)))));
      EXPECT_EQ(StepsIn(plan.folder), std::vector<int64_t>{step});
      std::vector<std::unique_ptr<GuardedRun>> rest;
      EXPECT_THAT(Train(plan, ranks, &rest),
                  Each(StatusIs(absl::StatusCode::kOk, "")));
      for (int rank = 0; rank < ranks; ++rank) {
        std::vector<double> losses = runs[rank]->losses;
        losses.insert(losses.end(), rest[rank]->losses.begin(),
                      rest[rank]->losses.end());
        EXPECT_EQ(losses, whole[rank]->losses) << "rank " << rank;
      }
    }
  }
}

TEST(RunGuardTest, ASignalInTheLastStepChangesNothing) {
  Plan plan;
  plan.folder = FreePath("guard_4");
  int64_t asked = 0;
  plan.guard.signal = [&asked, &plan] {
    return ++asked == plan.steps ? SIGTERM : 0;
  };
  std::vector<std::unique_ptr<GuardedRun>> runs;
  EXPECT_THAT(Train(plan, 1, &runs), Each(StatusIs(absl::StatusCode::kOk, "")));
  EXPECT_EQ(StepsIn(plan.folder), std::vector<int64_t>{6});
}

// Flags go with the checkpoints, as all entries do.
TEST(RunGuardTest, FlagsThatHaveChangedAreNamed) {
  TrainingRun run;
  EXPECT_THAT(NoteFlags({{"--seed", "1"}, {"--seq", "64"}}, 0, 5, &run),
              ::testing::IsEmpty());
  EXPECT_THAT(
      NoteFlags({{"--seed", "1"}, {"--seq", "32"}, {"--data", ""}}, 4, 5, &run),
      ElementsAre("--seq=32: the checkpoint is of a run with "
                  "--seq=64"));
  EXPECT_THAT(NoteFlags({{"--data", ""}, {"--seq", "32"}}, 7, 5, &run),
              ElementsAre("nothing to train: the checkpoint has step 7 of 5"));
}

TEST(RunGuardTest, WithoutCheckpointsAStoppedRunSaysSo) {
  Plan plan;
  plan.guard.signal = [] { return SIGINT; };
  std::vector<std::unique_ptr<GuardedRun>> runs;
  EXPECT_THAT(
      Train(plan, 1, &runs),
      Each(StatusIs(absl::StatusCode::kCancelled,
                    "stopped by signal 2 (SIGINT) after step 1, of which "
                    "nothing was saved")));
}

TEST(RunGuardTest, SavesEverySoManyStepsAndTheLast) {
  Plan plan;
  plan.folder = FreePath("guard_5");
  plan.steps = 7;
  plan.guard.save_every = 3;
  std::vector<int64_t> noted;
  plan.guard.before_save = [&noted](int64_t step) {
    noted.push_back(step);
    return step != 3;
  };
  std::vector<std::unique_ptr<GuardedRun>> runs;
  EXPECT_THAT(Train(plan, 1, &runs), Each(StatusIs(absl::StatusCode::kOk, "")));
  EXPECT_EQ(noted, (std::vector<int64_t>{3, 6, 7}));
  EXPECT_EQ(StepsIn(plan.folder), (std::vector<int64_t>{6, 7}));
}

// The errors of other ranks name the step in which one has finished.
TEST(RunGuardTest, WhoHasFinishedIsSaidToHaveLeftInItsStep) {
  auto group = comm::CreateLocalGroup(2);
  ASSERT_OK(group);
  std::vector<absl::Status> ends(2);
  std::vector<std::thread> threads;
  threads.reserve(2);
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Plan plan;
      if (rank == 1) plan.steps = 4;
      GuardedRun run(plan, *(*group)[rank]);
      const absl::Status thrown =
          TorchToStatus("training", [&] { ends[rank] = run.Train(); });
      if (!thrown.ok()) ends[rank] = thrown;
      (*group)[rank].reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_OK(ends[1]);
  EXPECT_THAT(ends[0], StatusIs(absl::StatusCode::kUnavailable,
                                AllOf(HasSubstr("rank 1 (last seen in"),
                                      HasSubstr("of step 4) has left"))));
}

}  // namespace
}  // namespace fsdp::checkpoint
