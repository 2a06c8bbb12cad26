// LibTorch's own idioms work on a sharded model, or are refused with a text
// where plain LibTorch would do something else.
#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using Model = FullyShardedDataParallel<NetImpl>;

constexpr int kRanks = 2;

absl::StatusOr<Model> ShardNet(Communicator& world,
                               Options options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, 2), Unowned(world), GoOn(std::move(options)));
}

at::Tensor LossOf(Model& model) {
  const at::Tensor x = Rows(model->communicator().rank(), 2, kDim);
  return Loss(model->forward(x), x);
}

// --- Gradients of the module's own parameters --------------------------------

TEST(OwnGradientTest, IsRefusedByNameWhoeverAsks) {
  const std::vector<std::function<void(Model&)>> asks = {
      [](Model& model) {
        torch::nn::utils::clip_grad_norm_(model->parameters(), 1e-3);
      },
      [](Model& model) { model.module()->zero_grad(); },
      [](Model& model) { model.module()->blocks->zero_grad(false); },
      [](Model& model) { (void)model.module()->head->weight.grad(); },
      [](Model& model) {
        model.module()->head->weight.mutable_grad() = at::ones({kDim, kDim});
      },
  };
  for (const auto& ask : asks) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
      FSDP_RETURN_IF_ERROR(model->Backward(LossOf(model)));
      FSDP_RETURN_IF_ERROR(
          CheckRefused(TorchToStatus("ask", [&] { ask(model); }),
                       "the gradient of the module's own parameter "));
      model->zero_grad();
      return CheckTrains(model, MakeNet(kDim, 2), kDim);
    }));
  }
}

// Frozen, ignored and whole parameters behave as in LibTorch.
TEST(OwnGradientTest, OfWhatIsFrozenIgnoredOrWholeIsTheTensors) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.ignore.parameter = [](const std::string& name, const at::Tensor&) {
      return name == "head.bias";
    };
    auto net = MakeNet(kDim, 2);
    net->embed->bias.set_requires_grad(false);
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
    FSDP_RETURN_IF_ERROR(model->Backward(LossOf(model)));
    EXPECT_FALSE(net->embed->bias.grad().defined());
    EXPECT_TRUE(net->head->bias.grad().defined());
    SummonOptions summon;
    summon.with_grads = true;
    {
      FSDP_ASSIGN_OR_RETURN(auto full, model->SummonFullParams(summon));
      EXPECT_TRUE(net->head->weight.grad().defined());
    }
    model->zero_grad();
    EXPECT_FALSE(net->head->bias.grad().defined());
    for (const at::Tensor& shard : model->Parameters()) {
      EXPECT_FALSE(shard.grad().defined());
    }
    return absl::OkStatus();
  }));
}

// --- Shards that are replaced ------------------------------------------------

TEST(ReplacedShardTest, IsRefusedUntilItIsPutBack) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
    torch::optim::SGD optimizer(model->Parameters(), 0.1);
    at::Tensor shard = model->Ranges().back().values;
    const at::Tensor before = shard.detach();
    const std::string text =
        absl::StrCat("the shard of parameter ", model->Ranges().back().name);
    shard.set_data(at::full_like(before, 0.5));
    FSDP_RETURN_IF_ERROR(CheckRefused(CheckOptimizer(*model, optimizer), text));
    FSDP_RETURN_IF_ERROR(CheckRefused(model->GatherStateDict().status(), text));
    FSDP_RETURN_IF_ERROR(
        CheckRefused(TorchToStatus("forward", [&] { LossOf(model); }), text));
    shard.set_data(before);
    FSDP_RETURN_IF_ERROR(CheckOptimizer(*model, optimizer));
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

// --- Shards that are written between a forward and its backward --------------

struct Write {
  std::string name;
  std::function<absl::Status(Model&)> act;
};

template <typename Optimizer, typename OptimizerOptions>
std::function<absl::Status(Model&)> StepOf() {
  return [](Model& model) {
    return TorchToStatus("step", [&] {
      Optimizer(model->Parameters(), OptimizerOptions(0.1)).step();
    });
  };
}

const Write kWrites[] = {
    {"AdamW", StepOf<torch::optim::AdamW, torch::optim::AdamWOptions>()},
    {"FusedAdamW", StepOf<FusedAdamW, torch::optim::AdamWOptions>()},
    {"FusedSgd", StepOf<FusedSGD, torch::optim::SGDOptions>()},
    {"StateDict",
     [](Model& model) {
       StateDict dict;
       const auto other = MakeNet(kDim, 2, 9);
       for (const auto& item : other->named_parameters()) {
         dict.insert(item.key(), item.value().detach());
       }
       return model->LoadStateDict(dict);
     }},
    {"FullParameters",
     [](Model& model) -> absl::Status {
       FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
       c10::NoGradGuard no_grad;
       for (at::Tensor& p : model.module()->parameters()) p.mul_(2);
       return full.Close();
     }},
    {"ByHand",
     [](Model& model) {
       c10::NoGradGuard no_grad;
       for (const at::Tensor& shard : model->Parameters()) shard.mul_(2);
       return absl::OkStatus();
     }},
};

class WriteTest : public ::testing::TestWithParam<Write> {};

absl::Status CheckStaleGraphIsRefused(Communicator& world, Options options,
                                      const Write& write) {
  FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world, std::move(options)));
  FSDP_RETURN_IF_ERROR(model->Backward(LossOf(model)));
  const at::Tensor stale = LossOf(model);
  FSDP_RETURN_IF_ERROR(write.act(model));
  FSDP_RETURN_IF_ERROR(CheckRefused(
      model->Backward(stale), "whose parameters have changed since: shards"));
  // A new forward uses the present values.
  model->zero_grad();
  return model->Backward(LossOf(model));
}

TEST_P(WriteTest, BeforeABackwardIsRefusedAsInPlainLibTorch) {
  Options keeps = BlockUnits();
  keeps.unit.strategy = ShardingStrategy::kShardGradOp;
  Options transparent = BlockUnits();
  transparent.transparent = true;
  for (const Options& options : {BlockUnits(), keeps, transparent}) {
    const auto check = [&](Communicator& world) {
      return CheckStaleGraphIsRefused(world, options, GetParam());
    };
    EXPECT_OK(RunAllRanks(kRanks, check));
    EXPECT_OK(RunSharing(kRanks, check));
  }
}

INSTANTIATE_TEST_SUITE_P(All, WriteTest, ::testing::ValuesIn(kWrites),
                         [](const auto& info) { return info.param.name; });

// Reading changes nothing.
TEST(StaleGraphTest, WhatOnlyReadsIsNoWrite) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
    const at::Tensor loss = LossOf(model);
    FSDP_RETURN_IF_ERROR(model->GatherStateDict().status());
    { FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams()); }
    VisitOptions visit;
    visit.writeback = true;
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [](const std::string&, const at::Tensor&) { return absl::OkStatus(); },
        visit));
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    model->zero_grad();
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

// Computes x + p: backward needs no value of p, here as in plain LibTorch.
class Adds : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return x + p; }
  at::Tensor p = register_parameter("p", at::ones({kDim}));
};

TEST(StaleGraphTest, AGraphThatHasSavedNoParameterIsNotStale) {
  Adds plain;
  const at::Tensor loss = plain.forward(Rows(0, 2, kDim)).sum();
  {
    c10::NoGradGuard no_grad;
    plain.p.mul_(2);
  }
  loss.backward();
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<Adds>(), Unowned(world)));
    const at::Tensor loss = model->forward(Rows(0, 2, kDim)).sum();
    {
      c10::NoGradGuard no_grad;
      model->Parameters()[0].mul_(2);
    }
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    const TensorRange& named = model->Ranges()[0];
    return Check(at::equal(named.values.grad(), OwnPart(named, plain.p.grad())),
                 "gradient");
  }));
}

// --- Writes to unsharded parameters ------------------------------------------

// Clips a weight in a way that no version counter shows.
at::Tensor ClipsAWeight(Mlp& net, const at::Tensor& x) {
  net.first->weight.data().narrow(0, 1, 2).clamp_(-0.05, 0.05);
  return net.first->forward(x);
}

absl::Status CheckClipIsRefused(Communicator& world, Options options) {
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(Filled<Mlp>(), Unowned(world),
                                               GoOn(std::move(options))));
  const auto forward = [&](bool grad) {
    const at::AutoGradMode mode(grad);
    return TorchToStatus("forward", [&] { model->forward(Rows(0, 2, kDim)); });
  };
  // A training forward is watched even after one without grad.
  model->eval();
  FSDP_RETURN_IF_ERROR(forward(/*grad=*/false));
  FSDP_RETURN_IF_ERROR(forward(/*grad=*/true));
  model->train();
  model->module()->body = ClipsAWeight;
  for (const bool grad : {true, true, false}) {
    FSDP_RETURN_IF_ERROR(CheckRefused(
        forward(grad), "parameter first.weight was modified in place"));
  }
  // Nothing was written.
  model->module()->body = nullptr;
  return CheckTrains(model, Filled<Mlp>(), kDim);
}

TEST(WriteInForwardTest, ByDataIsRefusedAlikeWhereverParametersLie) {
  Options replicated;
  replicated.unit.strategy = ShardingStrategy::kNoShard;
  Options transparent;
  transparent.transparent = true;
  for (const Options& options : {Options(), replicated, transparent}) {
    const auto check = [&](Communicator& world) {
      return CheckClipIsRefused(world, options);
    };
    EXPECT_OK(RunAllRanks(1, check));
    EXPECT_OK(RunAllRanks(kRanks, check));
    EXPECT_OK(RunSharing(kRanks, check));
  }
}

TEST(WriteWhileUnshardedTest, IsRefusedByTheNextForward) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
    torch::nn::Module& block = *model.module()->blocks[0];
    FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(block));
    FSDP_RETURN_IF_ERROR(handle.Wait());
    {
      c10::NoGradGuard no_grad;
      block.parameters().front().mul_(2);
    }
    FSDP_RETURN_IF_ERROR(
        CheckRefused(TorchToStatus("forward", [&] { LossOf(model); }),
                     "parameter blocks.0.fc.weight of unit blocks.0 was "
                     "written outside a forward"));
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

// An optimizer or WeightAverage::InModel() may do so.
TEST(WriteBetweenBackwardsTest, IsRefusedWhereAnOldCopyWouldCompute) {
  for (const bool keeps : {false, true}) {
    const auto run = [&](Communicator& world) -> absl::Status {
      Options options;
      if (keeps) options.unit.strategy = ShardingStrategy::kShardOptimizer;
      FSDP_ASSIGN_OR_RETURN(
          auto model,
          FullyShard(Filled<Mlp>(), Unowned(world), GoOn(std::move(options))));
      const at::Tensor x = Rows(0, 2, kDim);
      {
        const NoSyncScope no_sync = model->NoSync();
        FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      }
      const c10::NoGradGuard no_grad;
      for (at::Tensor& shard : model->Parameters()) shard.mul_(2);
      const absl::Status forward =
          TorchToStatus("forward", [&] { model->forward(x); });
      return keeps ? CheckRefused(forward, "over a backward under NoSync()")
                   : forward;
    };
    EXPECT_OK(RunAllRanks(kRanks, run)) << keeps;
  }
}

constexpr double kPi = 3.14159265358979323846;

// Weights decay, biases do not; the rate follows a cosine.
TEST(GuideTest, GroupsThatDecayAndACosineSchedule) {
  constexpr int kRanks = 2;
  constexpr int kSteps = 5;
  auto plain = MakeNet(kDim, 2);
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& p : plain->parameters()) {
    (p.dim() > 1 ? matrices : vectors).push_back(p);
  }
  torch::optim::AdamW plain_optimizer(
      matrices, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  plain_optimizer.add_param_group(
      {vectors, std::make_unique<torch::optim::AdamWOptions>(
                    torch::optim::AdamWOptions(1e-2).weight_decay(0))});
  for (int step = 0; step < kSteps; ++step) {
    const double lr = 1e-2 * 0.5 * (1 + std::cos(kPi * step / kSteps));
    for (auto& group : plain_optimizer.param_groups()) {
      static_cast<torch::optim::AdamWOptions&>(group.options()).lr(lr);
    }
    plain_optimizer.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank) {
      const at::Tensor x = Rows(int64_t{3} * rank, 3, kDim);
      (Loss(plain->forward(x), x) / kRanks).backward();
    }
    plain_optimizer.step();
  }
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits()));
    const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
    FusedAdamW optimizer(DecayGroups(*model, options), options);
    for (int step = 0; step < kSteps; ++step) {
      const double lr = 1e-2 * 0.5 * (1 + std::cos(kPi * step / kSteps));
      for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
      optimizer.zero_grad();
      const at::Tensor x = Rows(int64_t{3} * world.rank(), 3, kDim);
      FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      optimizer.step();
    }
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          const at::Tensor expected = *plain->named_parameters().find(name);
          return Check(at::allclose(value, expected, 1e-4, 1e-5), name);
        });
  }));
}

}  // namespace
}  // namespace fsdp::testing
