// Misuse gives the same error on every rank, which says what to do, and the
// model trains on exactly as one process does. Simple refusals are tested
// beside the code that refuses: shard_module_test.cc (wrapping),
// sharded_model_test.cc (steps), strategies_test.cc (meshes),
// mixed_precision_test.cc (dtypes), full_params_test.cc (scopes).
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>
#include <thread>

#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using Model = FullyShardedDataParallel<NetImpl>;

constexpr int kRanks = 2;

struct Misuse {
  std::string name;
  std::function<absl::Status(Model&)> act;
  Code code;
  std::string text;
};

// Returns a misuse whose status is the exception of `act`.
std::function<absl::Status(Model&)> Throws(std::function<void(Model&)> act) {
  return [act = std::move(act)](Model& model) {
    return TorchToStatus("misuse", [&] { act(model); });
  };
}

at::Tensor& HeadWeight(Model& model) { return model.module()->head->weight; }

at::Tensor LossOf(Model& model) {
  const at::Tensor x = Rows(0, 2, kDim);
  return Loss(model->forward(x), x);
}

const Misuse kBetweenSteps[] = {
    {"ToDtype", Throws([](Model& model) { model->to(at::kDouble); }),
     Code::kFailedPrecondition, "unit root"},
    {"ToDtypeOfTheModule",
     Throws([](Model& model) { model.module()->to(at::kHalf); }),
     Code::kFailedPrecondition, "unit root"},
    {"ToDevice", Throws([](Model& model) { model->to(at::kMeta); }),
     Code::kInternal, "incompatible tensor type"},
    {"SaveTheModule", Throws([](Model& model) {
       std::ostringstream stream;
       torch::save(model.module(), stream);
     }),
     Code::kFailedPrecondition, "unit root"},
    {"ResetParameters",
     Throws([](Model& model) { model.module()->head->reset_parameters(); }),
     Code::kFailedPrecondition, "unit root"},
    {"WriteAParameter", Throws([](Model& model) {
       c10::NoGradGuard no_grad;
       HeadWeight(model).fill_(1);
     }),
     Code::kFailedPrecondition, "Ranges()"},
    {"FreezeAParameter",
     Throws([](Model& model) { HeadWeight(model).requires_grad_(false); }),
     Code::kInternal, "leaf"},
    {"ShardAModuleInside",
     [](Model& model) {
       return FullyShard(std::dynamic_pointer_cast<BlockImpl>(
                             model.module()->blocks[0]),
                         Unowned(model->communicator()))
           .status();
     },
     Code::kFailedPrecondition, "already belongs to a unit"},
    {"OptimizeItsOwnParameters", Throws([](Model& model) {
       torch::optim::SGD optimizer(model.module()->parameters(), 0.1);
     }),
     Code::kInternal, "non-leaf Tensor"},
    {"NoLoss", [](Model& model) { return model->Backward(at::Tensor()); },
     Code::kInvalidArgument, "loss of one element"},
    {"LossOfManyElements",
     [](Model& model) {
       return model->Backward(model->forward(Rows(0, 2, kDim)));
     },
     Code::kInvalidArgument, "loss of one element"},
    {"LossWithoutGraph",
     [](Model& model) { return model->Backward(at::ones({})); },
     Code::kInvalidArgument, "loss of one element"},
    {"BackwardTwice",
     [](Model& model) {
       const at::Tensor loss = LossOf(model);
       FSDP_RETURN_IF_ERROR(model->Backward(loss));
       return model->Backward(loss);
     },
     Code::kInternal, "second time"},
    {"InputOfAnotherSize",
     Throws([](Model& model) { model->forward(Rows(0, 2, kDim + 1)); }),
     Code::kInternal, "shapes cannot be multiplied"},
    {"AnUnknownParameter",
     [](Model& model) { return model->SetTrainable("head.wait", false); },
     Code::kNotFound, "head.wait"},
};

class BetweenStepsTest : public ::testing::TestWithParam<Misuse> {};

TEST_P(BetweenStepsTest, IsRefusedOnAllRanksAndTheModelTrainsOn) {
  const Misuse& misuse = GetParam();
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(MakeNet(kDim, 2), Unowned(world), GoOn()));
    FSDP_RETURN_IF_ERROR(
        CheckRefused(misuse.act(model), misuse.text, misuse.code));
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

INSTANTIATE_TEST_SUITE_P(All, BetweenStepsTest,
                         ::testing::ValuesIn(kBetweenSteps),
                         [](const auto& info) { return info.param.name; });

// The next forward notices that a parameter's data was replaced. If the user
// puts the data back, the model trains on.
TEST(ReplacedDataTest, IsRefusedByTheNextForwardUntilItIsPutBack) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> replacements =
      {[](const at::Tensor&) {
         return at::zeros({kDim, kDim});
       },
       [](const at::Tensor&) {
         return at::zeros({2 * kDim, 3});
       },
       [](const at::Tensor& p) { return p.view({kDim * kDim}); },
       [](const at::Tensor& p) { return at::zeros(p.sizes(), at::kDouble); }};
  for (const auto& replacement : replacements) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          Model model, FullyShard(MakeNet(kDim, 2), Unowned(world), GoOn()));
      at::Tensor& weight = HeadWeight(model);
      const at::Tensor before = weight.detach();
      weight.set_data(replacement(before));
      for (int attempt = 0; attempt < 2; ++attempt) {
        FSDP_RETURN_IF_ERROR(CheckRefused(
            TorchToStatus("forward", [&] { LossOf(model); }),
            "parameter head.weight no longer looks into its unit's memory"));
      }
      weight.set_data(before);
      return CheckTrains(model, MakeNet(kDim, 2), kDim);
    }));
  }
}

using MlpModel = FullyShardedDataParallel<Mlp>;

struct InForward {
  std::function<at::Tensor(Mlp& net, const at::Tensor& x, MlpModel& model)> act;
  const char* text;
  bool has_units = false;
  // Whether the user's tensor stays in the module, so that the model does not
  // train on.
  bool stays = false;
};

const InForward kInForward[] = {
    {[](Mlp& net, const at::Tensor& x, MlpModel&) {
       c10::NoGradGuard no_grad;
       net.first->weight.mul_(2);
       return net.first->forward(x);
     },
     "parameter first.weight was modified in place"},
    {[](Mlp& net, const at::Tensor&, MlpModel&) { return net.first->weight; },
     "is a parameter or a view of one"},
    {[](Mlp& net, const at::Tensor&, MlpModel&) {
       return net.first->weight.detach().t();
     },
     "is a parameter or a view of one"},
    {[](Mlp& net, const at::Tensor&, MlpModel&) {
       return net.first->weight.t().narrow(0, 1, 2);
     },
     "is a parameter or a view of one"},
    {[](Mlp& net, const at::Tensor& x, MlpModel&) {
       net.first->weight.set_data(at::zeros({kDim, kDim}));
       return net.first->forward(x);
     },
     "parameter first.weight no longer looks into its unit's memory",
     /*has_units=*/false, /*stays=*/true},
    {[](Mlp&, const at::Tensor& x, MlpModel& model) {
       return model->forward(x);
     },
     "inside its own forward"},
    {[](Mlp& net, const at::Tensor& x, MlpModel&) {
       absl::Status status;
       std::thread([&] {
         status = TorchToStatus("forward", [&] { Forward(net.first, x); });
       }).join();
       ThrowIfError(status);
       return x;
     },
     "on another thread", /*has_units=*/true},
};

TEST(InForwardTest, WhatAForwardMayNotDoIsRefusedAndLost) {
  const auto usual = [](Mlp& net, const at::Tensor& x) {
    const at::Tensor y = Forward(net.second, Forward(net.first, x).tanh());
    return Forward(net.third, y);
  };
  for (const InForward& misuse : kInForward) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      const Options options =
          misuse.has_units ? UnitsOf<torch::nn::LinearImpl>() : Options();
      FSDP_ASSIGN_OR_RETURN(
          MlpModel model,
          FullyShard(std::make_shared<Mlp>(), Unowned(world), GoOn(options)));
      model.module()->body = [&](Mlp& net, const at::Tensor& x) {
        return misuse.act(net, x, model);
      };
      FSDP_RETURN_IF_ERROR(CheckRefused(
          TorchToStatus("forward", [&] { model->forward(Rows(0, 2, kDim)); }),
          misuse.text));
      if (misuse.stays) return absl::OkStatus();
      model.module()->body = usual;
      return CheckTrains(model, std::make_shared<Mlp>(usual), kDim);
    })) << misuse.text;
  }
}

struct Difference {
  std::string name;
  // What rank 1 does differently.
  std::function<void(Options&, NetImpl&)> act;
  std::string text;
};

const Difference kDifferences[] = {
    {"Strategy",
     [](Options& options, NetImpl&) {
       options.unit.strategy = ShardingStrategy::kShardGradOp;
     },
     "unit root: "},
    {"Precision",
     [](Options& options, NetImpl&) {
       options.unit.precision = ComputeIn(at::kBFloat16);
     },
     "BFloat16"},
    {"BackwardGroup",
     [](Options& options, NetImpl&) { options.unit.backward_group_size = 1; },
     "backward group"},
    {"Units", [](Options& options, NetImpl&) { options.wrap_policy = nullptr; },
     "blocks.0.fc.weight"},
    {"Prefetch",
     [](Options& options, NetImpl&) { options.prefetch.forward = false; },
     "prefetch forward"},
    {"DivideFactor",
     [](Options& options, NetImpl&) { options.gradients.divide_factor = 7; },
     "divide by"},
    {"Frozen",
     [](Options&, NetImpl& net) { net.head->bias.requires_grad_(false); },
     "frozen"},
    {"Ignored",
     [](Options& options, NetImpl&) {
       options.ignore.parameter = [](const std::string& name,
                                     const at::Tensor&) {
         return name == "head.bias";
       };
     },
     "head.bias"},
};

class DifferenceTest : public ::testing::TestWithParam<Difference> {};

TEST_P(DifferenceTest, IsTheSameErrorOnAllRanksWhichMayTryAgain) {
  const Difference& difference = GetParam();
  std::vector<std::string> texts(3);
  EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    const std::shared_ptr<NetImpl> net = MakeNet(kDim, 2);
    if (world.rank() == 1) difference.act(options, *net);
    const absl::Status status =
        FullyShard(net, Unowned(world), options).status();
    FSDP_RETURN_IF_ERROR(
        CheckRefused(status, difference.text, Code::kInvalidArgument));
    FSDP_RETURN_IF_ERROR(
        CheckRefused(status, "rank 1 from rank 0", Code::kInvalidArgument));
    texts[world.rank()] = std::string(status.message());
    // Nothing has been changed, so the same modules may be sharded.
    for (at::Tensor& parameter : net->parameters()) {
      parameter.requires_grad_(true);
    }
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(net, Unowned(world), BlockUnits()));
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
  EXPECT_THAT(texts, Each(texts.front()));
}

INSTANTIATE_TEST_SUITE_P(All, DifferenceTest, ::testing::ValuesIn(kDifferences),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::testing
