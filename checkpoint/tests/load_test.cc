#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/files/file_system.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::FreePath;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::HasSubstr;

constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;

absl::StatusOr<std::unique_ptr<Checkpointer>> OpenIn(
    const std::string& folder, Communicator& world,
    const CheckpointerOptions& options = CheckpointerOptions()) {
  return Checkpointer::Open(folder, Unowned(world), options);
}

// A model that is not sharded and has stepped once.
struct Plain {
  explicit Plain(int seed) : model(MakeNet(kDim, kBlocks, seed)) {
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters());
    for (at::Tensor& parameter : model->parameters()) {
      parameter.mutable_grad() = at::full(parameter.sizes(), 0.5 + seed);
    }
    optimizer->step();
  }

  TrainingRun AsRun() {
    TrainingRun run;
    run.model = model.get();
    run.optimizer = optimizer.get();
    run.random_state = false;
    return run;
  }

  std::shared_ptr<NetImpl> model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

absl::Status Save(const std::string& folder, const TrainingRun& run) {
  return RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    const auto checkpoints = OpenIn(folder, world);
    if (!checkpoints.ok()) return checkpoints.status();
    return (*checkpoints)->Save(7, run);
  });
}

LoadContext Alone(const std::string& folder) {
  LoadContext context;
  context.files = &RealFileSystem();
  context.root = folder;
  return context;
}

TEST(LoadTest, ProgressIsThatOfTheModelAndTheOptimizer) {
  const std::string folder = FreePath("load_progress");
  Plain saved(/*seed=*/1);
  ASSERT_OK(Save(folder, saved.AsRun()));
  Plain loaded(/*seed=*/2);
  int64_t expected = 0;
  for (const at::Tensor& parameter : loaded.model->parameters()) {
    expected += 3 * static_cast<int64_t>(parameter.nbytes());
  }
  int64_t last = 0;
  LoadContext context = Alone(folder);
  context.progress = [&](int64_t done, int64_t all) {
    EXPECT_GT(done, last);
    EXPECT_EQ(all, expected);
    last = done;
  };
  TrainingRun run = loaded.AsRun();
  ASSERT_OK(LoadRun(context, 7, run));
  EXPECT_EQ(last, expected);
}

absl::StatusOr<FullyShardedDataParallel<NetImpl>> WithIgnoredHead(
    Communicator& world, int seed) {
  Options options = BlockUnits();
  options.ignore.parameter = [](const std::string& name, const at::Tensor&) {
    return name == "head.weight";
  };
  return FullyShard(MakeNet(kDim, kBlocks, seed), Unowned(world), options);
}

// Of what is not sharded, each rank gets its own.
TEST(LoadTest, IgnoredParametersThatDifferBetweenRanks) {
  const std::string folder = FreePath("load_ignored");
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto saved, WithIgnoredHead(world, 1));
    saved->module()->head->weight.detach().fill_(7 + world.rank());
    TrainingRun run;
    run.model = saved.get();
    run.random_state = false;  // of all threads together
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
    FSDP_RETURN_IF_ERROR(checkpoints->Save(7, run));
    FSDP_ASSIGN_OR_RETURN(auto loaded, WithIgnoredHead(world, 2));
    run.model = loaded.get();
    FSDP_RETURN_IF_ERROR(checkpoints->Load(7, run));
    const at::Tensor& weight = loaded->module()->head->weight;
    EXPECT_TRUE(weight.eq(7 + world.rank()).all().item<bool>());
    return absl::OkStatus();
  }));
}

// Of their states rank 0's are saved.
TEST(LoadTest, AnOptimizerOverIgnoredParameters) {
  const std::string folder = FreePath("load_ignored_states");
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const auto make = [](FullyShardedDataParallel<NetImpl>& model,
                         double gradient) {
      std::vector<at::Tensor> leaves = model->Parameters();
      leaves.push_back(model->module()->head->weight);
      for (at::Tensor& leaf : leaves) {
        leaf.mutable_grad() = at::full(leaf.sizes(), gradient);
      }
      auto optimizer = std::make_unique<torch::optim::AdamW>(leaves);
      optimizer->step();
      return optimizer;
    };
    FSDP_ASSIGN_OR_RETURN(auto saved, WithIgnoredHead(world, 1));
    const auto optimizer = make(saved, 1 + world.rank());
    TrainingRun run;
    run.model = saved.get();
    run.optimizer = optimizer.get();
    run.random_state = false;  // of all threads together
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
    FSDP_RETURN_IF_ERROR(checkpoints->Save(7, run));
    FSDP_ASSIGN_OR_RETURN(auto loaded, WithIgnoredHead(world, 2));
    const auto other = make(loaded, 9);
    run.model = loaded.get();
    run.optimizer = other.get();
    FSDP_RETURN_IF_ERROR(checkpoints->Load(7, run));
    const auto& state =
        dynamic_cast<torch::optim::AdamWParamState&>(*other->state().at(
            loaded->module()->head->weight.unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 1);
    EXPECT_TRUE(at::allclose(state.exp_avg(), at::full({kDim, kDim}, 0.1)));
    return absl::OkStatus();
  }));
}

// A parameter under each of `names`, all of them one if `tied`.
struct Weights : torch::nn::Module {
  Weights(const std::vector<std::string>& names, bool tied) {
    for (const std::string& name : names) {
      const at::Tensor value =
          tied && !weights.empty()
              ? weights.front()
              : at::full({3}, static_cast<double>(weights.size()));
      weights.push_back(register_parameter(name, value));
    }
  }

  std::vector<at::Tensor> weights;
};

using Groups = std::vector<std::vector<int>>;  // of indices of weights

// Stepped once; each group's learning rate is by 1 above that before it.
std::unique_ptr<torch::optim::AdamW> Stepped(const Weights& model,
                                             const Groups& groups,
                                             double first_rate,
                                             double gradient) {
  std::vector<torch::optim::OptimizerParamGroup> result;
  for (const std::vector<int>& indices : groups) {
    std::vector<at::Tensor> weights;
    weights.reserve(indices.size());
    for (const int i : indices) weights.push_back(model.weights[i]);
    for (at::Tensor& weight : weights) {
      weight.mutable_grad() = at::full({3}, gradient);
    }
    result.emplace_back(weights,
                        std::make_unique<torch::optim::AdamWOptions>(
                            first_rate + static_cast<double>(result.size())));
  }
  auto optimizer = std::make_unique<torch::optim::AdamW>(std::move(result));
  optimizer->step();
  return optimizer;
}

TrainingRun RunOf(Weights& model, torch::optim::Optimizer& optimizer) {
  TrainingRun run;
  run.model = &model;
  run.optimizer = &optimizer;
  run.random_state = false;
  return run;
}

std::vector<double> Rates(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) {
    rates.push_back(group.options().get_lr());
  }
  return rates;
}

double Moment(torch::optim::Optimizer& optimizer, const at::Tensor& weight) {
  auto& state = dynamic_cast<torch::optim::AdamWParamState&>(
      *optimizer.state().at(weight.unsafeGetTensorImpl()));
  return state.exp_avg()[0].item<double>();
}

TEST(LoadTest, OtherGroupsAreForThoseWhoAreNotStrict) {
  const std::string folder = FreePath("load_groups");
  Weights saved({"a", "b", "c"}, /*tied=*/false);
  const auto optimizer = Stepped(saved, {{0, 1}, {2}}, 10, /*gradient=*/1);
  ASSERT_OK(Save(folder, RunOf(saved, *optimizer)));
  struct Case {
    Groups groups;
    std::vector<double> rates;
  };
  // Of a, b, c, d.
  const std::vector<Case> cases = {
      {{{0, 1, 2, 3}}, {10}},            // most in common
      {{{2, 3}, {0}}, {11, 10}},         // not in their order
      {{{3}, {2}}, {10, 11}},            // nothing in common: its place
      {{{3}, {2}, {1}}, {20, 11, 10}}};  // not as many: its own
  for (const Case& one : cases) {
    Weights loaded({"a", "b", "c", "d"}, false);
    const auto other = Stepped(loaded, one.groups, 20, /*gradient=*/5);
    TrainingRun run = RunOf(loaded, *other);
    LoadContext context = Alone(folder);
    EXPECT_FALSE(LoadRun(context, 7, run).ok());
    context.strict = false;
    ASSERT_OK(LoadRun(context, 7, run));
    EXPECT_EQ(Rates(*other), one.rates);
    EXPECT_NEAR(Moment(*other, loaded.weights[2]), 0.1, 1e-6);
    size_t stepped = 0;
    for (const auto& group : one.groups) stepped += group.size();
    EXPECT_LE(other->state().size(), stepped);
  }
}

TEST(LoadTest, TiedParametersMayHaveAnotherFirstName) {
  const std::string folder = FreePath("load_tied");
  Weights saved({"embed", "head", "other"}, /*tied=*/true);
  const auto optimizer = Stepped(saved, {{0}}, 10, /*gradient=*/1);
  ASSERT_OK(Save(folder, RunOf(saved, *optimizer)));
  Weights loaded({"other", "head", "embed"}, /*tied=*/true);
  const auto other = Stepped(loaded, {{0}}, 20, /*gradient=*/5);
  TrainingRun run = RunOf(loaded, *other);
  ASSERT_OK(LoadRun(Alone(folder), 7, run));
  EXPECT_EQ(Rates(*other), std::vector<double>{10});
  EXPECT_NEAR(Moment(*other, loaded.weights[0]), 0.1, 1e-6);
}

// An average that goes on has the values that were saved, whatever it had. One
// that had not begun begins with the first Update() after the load.
TEST(LoadTest, AnAverageGoesOnFromACheckpoint) {
  constexpr double kDecay = 0.75;
  ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                       Checkpointer::Open(FreePath("average"), nullptr));
  const auto set = [](const Weights& model, double value) {
    model.weights[0].detach().fill_(value);
  };
  Weights saved({"a"}, /*tied=*/false);
  WeightAverage average(saved.parameters());
  TrainingRun run;
  run.model = &saved;
  ASSERT_OK(checkpoints->Save(1, run));
  run.average = &average;
  EXPECT_THAT(checkpoints->Load(1, run),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no average of the weights")));
  ASSERT_OK(checkpoints->Save(3, run));
  ASSERT_OK(average.Update(kDecay));
  set(saved, 4);
  ASSERT_OK(average.Update(kDecay));  // 1 now
  ASSERT_OK(average.InModel([&] {
    EXPECT_THAT(
        checkpoints->Save(2, run),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("InModel")));
  }));
  ASSERT_OK(checkpoints->Save(2, run));
  for (const bool has_one : {false, true}) {
    Weights loaded({"a"}, false);
    set(loaded, 7);
    WeightAverage other(loaded.parameters());
    if (has_one) ASSERT_OK(other.Update(kDecay));
    run.model = &loaded;
    run.average = &other;
    ASSERT_OK(checkpoints->Load(2, run));
    const at::Tensor& weight = loaded.weights[0];
    EXPECT_TRUE(at::equal(weight, at::full({3}, 4.0)));
    EXPECT_TRUE(at::equal(other.Of(weight), at::full({3}, 1.0)));
    set(loaded, 9);
    ASSERT_OK(other.Update(kDecay));
    EXPECT_TRUE(at::equal(other.Of(weight), at::full({3}, 3.0)));
    ASSERT_OK(checkpoints->Load(3, run));
    set(loaded, 5);
    ASSERT_OK(other.Update(kDecay));
    EXPECT_TRUE(at::equal(other.Of(weight), at::full({3}, 5.0)));
  }
  run.model = &saved;
  run.average = nullptr;
  EXPECT_OK(checkpoints->Load(2, run));
}

}  // namespace
}  // namespace fsdp::checkpoint
