#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optim/training_step.h"
#include "replicas/column.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::checkpoint::TrainingRun;
using ::fsdp::checkpoint::testing::CheckEqual;
using ::fsdp::checkpoint::testing::CoverPairs;
using ::fsdp::checkpoint::testing::kNumModelKinds;
using ::fsdp::checkpoint::testing::kNumNumberKinds;
using ::fsdp::checkpoint::testing::kNumOptimizerKinds;
using ::fsdp::checkpoint::testing::ShardedTraining;
using ::fsdp::checkpoint::testing::TrainingSetup;
using ::fsdp::checkpoint::testing::Values;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::Each;

absl::Time Deadline() { return absl::Now() + absl::Seconds(60); }

// Ranks of one process that are replicas of as many ranks each.
struct Shape {
  int ranks = 1;
  int root = 0;
  int steps_of_root = 3;
  int steps_of_others = 0;
};

// After the handover every replica is as the root was, and goes on alike.
absl::Status CheckHandover(Communicator& world, const Shape& shape,
                           const TrainingSetup& setup) {
  FSDP_ASSIGN_OR_RETURN(const auto inside,
                        world.Split(world.rank() / shape.ranks, world.rank()));
  FSDP_ASSIGN_OR_RETURN(const auto column,
                        world.Split(world.rank() % shape.ranks, world.rank()));
  const int replica = column->rank();
  const bool is_root = replica == shape.root;
  FSDP_ASSIGN_OR_RETURN(
      const auto training,
      ShardedTraining::Make(*inside, setup, /*seed=*/replica + 1));
  const int steps = is_root ? shape.steps_of_root : shape.steps_of_others;
  for (int step = 0; step < steps; ++step) {
    FSDP_RETURN_IF_ERROR(training->Step(10 * replica + step).status());
  }
  FSDP_ASSIGN_OR_RETURN(const Values before, training->Gather());
  TrainingRun run = training->AsRun();
  run.entries["from"] = absl::StrCat("replica ", replica);
  run.rank_entries["own"] = absl::StrCat("rank ", world.rank());

  FSDP_RETURN_IF_ERROR(HandOver(*column, shape.root, run, Deadline()));

  EXPECT_EQ(run.entries["from"], absl::StrCat("replica ", shape.root));
  EXPECT_EQ(run.rank_entries["own"], absl::StrCat("rank ", world.rank()));
  FSDP_ASSIGN_OR_RETURN(Values after, training->Gather());
  if (is_root) FSDP_RETURN_IF_ERROR(CheckEqual(after, before));
  std::vector<double> losses;
  for (int step = 50; step < 53; ++step) {
    FSDP_ASSIGN_OR_RETURN(losses.emplace_back(), training->Step(step));
  }
  FSDP_ASSIGN_OR_RETURN(const Values later, training->Gather());
  // Each value is compared with the root's, rank by rank of the column.
  for (const Values* const values : {&std::as_const(after), &later}) {
    for (const auto& [name, value] : *values) {
      at::Tensor other = value.clone().contiguous();
      FSDP_ASSIGN_OR_RETURN(auto work,
                            column->Broadcast(other.view({-1}).view(at::kByte),
                                              shape.root, name));
      FSDP_RETURN_IF_ERROR(work->Wait(Deadline()));
      EXPECT_TRUE(at::equal(value, other))
          << name << (values == &after ? "" : ", some steps later");
    }
  }
  return absl::OkStatus();
}

TEST(HandoverTest, WithAnyModelOptimizerStrategyAndTier) {
  enum Level { kModel, kNumbers, kOptimizer, kStrategy, kTier, kUnits };
  for (const std::vector<int>& row : CoverPairs(
           {kNumModelKinds, kNumNumberKinds, kNumOptimizerKinds, 5, 3, 2})) {
    checkpoint::testing::SetupChoice choice;
    choice.model = row[kModel];
    choice.numbers = row[kNumbers];
    choice.optimizer = row[kOptimizer];
    choice.strategy = choice.other_strategy = row[kStrategy];
    choice.tier = choice.other_tier = row[kTier];
    choice.directory = EmptyFolder("ssd");
    TrainingSetup setup = checkpoint::testing::SetupsOf(choice).first;
    setup.units = row[kUnits] == 0;
    SCOPED_TRACE(ToString(setup));
    Shape shape;
    shape.ranks = 2;
    EXPECT_OK(RunAllRanks(4, [&](Communicator& world) {
      return CheckHandover(world, shape, setup);
    }));
  }
}

// Those that get states may have some already; a root without states leaves
// none.
TEST(HandoverTest, BetweenAnyNumbersOfReplicasRanksAndSteps) {
  struct Case : Shape {
    int replicas;
  };
  const Case cases[] = {{{3, 0}, 2}, {{3, 1}, 2},       {{1, 0}, 3},
                        {{1, 2}, 3}, {{1, 0}, 5},       {{1, 4}, 5},
                        {{2, 0}, 1}, {{2, 0, 3, 2}, 2}, {{2, 0, 0, 2}, 2}};
  for (const Case& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.replicas, " of ", c.ranks, ", from ", c.root,
                              " after ", c.steps_of_root));
    EXPECT_OK(RunAllRanks(c.replicas * c.ranks, [&](Communicator& world) {
      return CheckHandover(world, c, TrainingSetup());
    }));
  }
}

// Has a module without shards, and gradients between backward and step.
struct Plain {
  explicit Plain(int width, double start)
      : net(torch::nn::Linear(3, width), torch::nn::BatchNorm1d(width)),
        optimizer(net->parameters(), torch::optim::AdamWOptions(0.1)) {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) parameter.fill_(start);
    run.model = net.ptr().get();
    run.optimizer = &optimizer;
    run.random_state = false;
  }

  void Step() {
    for (at::Tensor& parameter : net->parameters()) {
      parameter.mutable_grad() = at::full_like(parameter, 0.5);
    }
    optimizer.step();
  }

  torch::nn::Sequential net;
  torch::optim::AdamW optimizer;
  TrainingRun run;
};

TEST(HandoverTest, GradientsStayAndOptionsOfTheOptimizerTravel) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& column) -> absl::Status {
    Plain plain(4, column.rank());
    plain.Step();
    plain.optimizer.param_groups()[0].options().set_lr(column.rank() + 1.0);
    const double mine = 10 + column.rank();
    for (at::Tensor& parameter : plain.net->parameters()) {
      parameter.mutable_grad().fill_(mine);
    }
    FSDP_RETURN_IF_ERROR(HandOver(column, 1, plain.run, Deadline()));
    for (const at::Tensor& parameter : plain.net->parameters()) {
      FSDP_RETURN_IF_ERROR(
          CheckEqual({{"gradient", parameter.grad()}},
                     {{"gradient", at::full_like(parameter, mine)}}));
    }
    EXPECT_EQ(plain.optimizer.param_groups()[0].options().get_lr(), 2.0);
    return absl::OkStatus();
  }));
}

// Only the rank that gets it may have one.
TEST(HandoverTest, AnAverageThatHasNotBegunBeginsWithTheNextUpdate) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& column) -> absl::Status {
    Plain plain(4, column.rank());
    WeightAverage average(plain.net->parameters());
    plain.run.average = &average;
    if (column.rank() == 1) FSDP_RETURN_IF_ERROR(average.Update(0.5));
    FSDP_RETURN_IF_ERROR(HandOver(column, 0, plain.run, Deadline()));
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : plain.net->parameters()) parameter.fill_(7);
    FSDP_RETURN_IF_ERROR(average.Update(0.5));
    for (const at::Tensor& parameter : plain.net->parameters()) {
      FSDP_RETURN_IF_ERROR(
          CheckEqual({{"average", average.Of(parameter)}},
                     {{"average", at::full_like(parameter, 7)}}));
    }
    return absl::OkStatus();
  }));
}

// All units have more bytes than the memory in front of the files.
TEST(HandoverTest, ManySmallUnitsThatRestInFiles) {
  const std::string folder = EmptyFolder("units");
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Communicator> alone,
                          world.Split(world.rank(), 0));
    torch::nn::Sequential net;
    for (int i = 0; i < 40; ++i) net->push_back(torch::nn::Linear(16, 16));
    Options options;
    options.wrap_policy = WrapModules<torch::nn::LinearImpl>();
    options.offload.parameters = options.offload.gradients =
        options.offload.optimizer = Tier::kSsd;
    options.offload.directory = folder;
    options.offload.name = absl::StrCat("replica", world.rank());
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, alone, options));
    FusedAdamW optimizer(model->Parameters(), torch::optim::AdamWOptions(0.1));
    FSDP_RETURN_IF_ERROR(model->Backward(
        model->forward(at::ones({2, 16}) * (world.rank() + 1)).sum()));
    optimizer.step();
    optimizer.zero_grad();
    WeightAverage average(model->Parameters());
    if (world.rank() == 1) FSDP_RETURN_IF_ERROR(average.Update(0.5));
    TrainingRun run;
    run.model = model.get();
    run.optimizer = &optimizer;
    run.average = &average;
    FSDP_RETURN_IF_ERROR(HandOver(world, /*root=*/1, run, Deadline()));
    FSDP_ASSIGN_OR_RETURN(const StateDict values, model->GatherStateDict());
    for (const auto& item : values) {
      const at::Tensor other = item.value().flatten().clone();
      FSDP_RETURN_IF_ERROR(comm::BroadcastTensor(world, other, /*root=*/1,
                                                 item.key(), Deadline()));
      EXPECT_TRUE(at::equal(item.value().flatten(), other)) << item.key();
    }
    return absl::OkStatus();
  }));
}

// Rank 2 has another model or another optimizer.
TEST(HandoverTest, WhatDiffersIsRefusedWithNothingChanged) {
  for (const bool in_model : {true, false}) {
    const auto statuses = RunRanks(3, [&](Communicator& column) {
      const bool differs = column.rank() == 2;
      Plain plain(in_model && differs ? 5 : 4, column.rank());
      plain.Step();
      torch::optim::SGD other(plain.net->parameters(),
                              torch::optim::SGDOptions(0.1));
      if (!in_model && differs) plain.run.optimizer = &other;
      std::vector<at::Tensor> before;
      for (const at::Tensor& parameter : plain.net->parameters()) {
        before.push_back(parameter.detach().clone());
      }
      absl::Status status = HandOver(column, 0, plain.run, Deadline());
      const std::vector<at::Tensor> after = plain.net->parameters();
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_OK(CheckEqual({{"it", after[i]}}, {{"it", before[i]}}));
      }
      return status;
    });
    EXPECT_THAT(
        statuses,
        Each(StatusIs(absl::StatusCode::kInvalidArgument,
                      ::testing::HasSubstr(in_model ? "0.weight" : ""))));
  }
}

TEST(HandoverTest, ARankThatIsAbortedEndsTheOthers) {
  const auto statuses = RunRanks(3, [](Communicator& column) -> absl::Status {
    Plain plain(4, column.rank());
    if (column.rank() == 0) {
      column.Abort(absl::UnavailableError("lost"));
      return absl::OkStatus();
    }
    const absl::Status status = HandOver(column, 0, plain.run, Deadline());
    return status.ok() ? absl::InternalError("it went on") : absl::OkStatus();
  });
  EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kOk, _)));
}

}  // namespace
}  // namespace fsdp::replicas
