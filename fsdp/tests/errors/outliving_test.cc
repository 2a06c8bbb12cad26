// After a scope of full parameters and the caller's InferenceMode, no memory is
// held and everything trains.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adamw.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using Model = FullyShardedDataParallel<NetImpl>;

constexpr int64_t kDim = 4;
constexpr int kRanks = 2;

// --- Tensors that are handed out ---------------------------------------------

absl::Status CheckIsOver(const std::vector<at::Tensor>& tensors,
                         const std::string& what) {
  for (const at::Tensor& tensor : tensors) {
    FSDP_RETURN_IF_ERROR(CheckThat(
        TorchToStatus("read", [&] { tensor.clone(); }),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(what)),
        "read"));
  }
  return absl::OkStatus();
}

TEST(HandedOutTest, ViewsOfSummonedParametersAndGradientsEndWithTheScope) {
  for (const bool offload : {false, true}) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          Model model,
          FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits()));
      const at::Tensor x = Rows(world.rank(), 2, kDim);
      FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      SummonOptions summon;
      summon.with_grads = true;
      summon.offload_to_cpu = offload;
      std::vector<at::Tensor> views;
      at::Tensor copy;
      {
        FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                              model->SummonFullParams(summon));
        at::Tensor& weight = model.module()->head->weight;
        views = {weight.t(), weight.detach(), weight.select(0, 1),
                 weight.data(), weight.grad().select(0, 1)};
        copy = weight.detach().clone();
        FSDP_RETURN_IF_ERROR(Check(at::equal(views[1], copy), "in the scope"));
      }
      FSDP_RETURN_IF_ERROR(
          CheckIsOver(views, "the scope of SummonFullParams() is over"));
      // Graphs that hold these tensors do not disturb, and get nothing.
      FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      FSDP_RETURN_IF_ERROR(
          CheckIsOver(views, "the scope of SummonFullParams() is over"));
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      return Check(at::equal(dict["head.weight"], copy), "the copy");
    }));
  }
}

TEST(HandedOutTest, WhatAVisitorKeepsEndsWithItsCall) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        Model model,
        FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits()));
    std::vector<at::Tensor> kept;
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [&](const std::string&, const at::Tensor& value) {
          kept.push_back(value);
          return Check(value.abs().sum().item<float>() > 0, "no values");
        }));
    return CheckIsOver(kept, "the visit of ForEachFullParameter() is over");
  }));
}

TEST(HandedOutTest, RebuiltFlatParametersEndWithTheirGather) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        Model model,
        FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits()));
    FSDP_ASSIGN_OR_RETURN(const std::vector<RebuiltParameter> rebuilt,
                          model->RebuildFullParams());
    std::vector<at::Tensor> flats;
    for (const RebuiltParameter& each : rebuilt) {
      FSDP_RETURN_IF_ERROR(
          Check(each.flat.abs().sum().item<float>() > 0, "no values"));
      flats.push_back(each.flat);
    }
    const at::Tensor x = Rows(0, 2, kDim);
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    return CheckIsOver(flats, "are sharded");
  }));
}

// --- InferenceMode -----------------------------------------------------------

// A linear layer and running statistics, which eval mode reads.
class StatisticsNet : public torch::nn::Module {
 public:
  StatisticsNet()
      : linear(register_module("linear", torch::nn::Linear(kDim, kDim))),
        norm(register_module("norm", torch::nn::BatchNorm1d(kDim))) {
    FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm->forward(linear->forward(x).to(norm->running_mean.dtype()));
  }
  torch::nn::Linear linear;
  torch::nn::BatchNorm1d norm;
};
using Sharded = FullyShardedDataParallel<StatisticsNet>;

struct InMode {
  std::string name;
  std::function<absl::Status(Sharded&, torch::optim::Optimizer&)> act;
};

const InMode kInMode[] = {
    {"Eval",
     [](Sharded& model, torch::optim::Optimizer&) {
       model->eval();
       model->forward(Rows(0, 3, kDim));
       model->train();
       return absl::OkStatus();
     }},
    {"Train",
     [](Sharded& model, torch::optim::Optimizer&) {
       model->forward(Rows(0, 3, kDim));
       return absl::OkStatus();
     }},
    {"Summon",
     [](Sharded& model, torch::optim::Optimizer&) -> absl::Status {
       SummonOptions summon;
       summon.with_grads = true;
       FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                             model->SummonFullParams(summon));
       model.module()->linear->weight.mul_(1.5);
       return full.Close();
     }},
    {"StateDict",
     [](Sharded& model, torch::optim::Optimizer&) -> absl::Status {
       FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
       return model->LoadStateDict(dict);
     }},
    {"Visit",
     [](Sharded& model, torch::optim::Optimizer&) {
       VisitOptions visit;
       visit.writeback = true;
       return model->ForEachFullParameter(
           [](const std::string&, const at::Tensor& value) {
             value.mul_(0.9);
             return absl::OkStatus();
           },
           visit);
     }},
    {"Rebuild",
     [](Sharded& model, torch::optim::Optimizer&) {
       return model->RebuildFullParams().status();
     }},
    {"OptimizerState",
     [](Sharded& model, torch::optim::Optimizer& optimizer) -> absl::Status {
       FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict state,
                             model->GatherOptimizerState(optimizer));
       return model->LoadOptimizerState(optimizer, state);
     }},
};

// Returns the parameters after three steps; before each, `act` runs inside an
// InferenceMode or a NoGradGuard.
absl::StatusOr<StateDict> TrainAround(Communicator& world,
                                      const Options& options,
                                      const InMode& mode, bool inference) {
  FSDP_ASSIGN_OR_RETURN(
      Sharded model,
      FullyShard(std::make_shared<StatisticsNet>(), Unowned(world), options));
  torch::optim::AdamW optimizer(model->Parameters(), 0.1);
  const at::Tensor x = Rows(world.rank(), 3, kDim);
  const auto step = [&]() -> absl::Status {
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(x).to(at::kFloat).square().mean()));
    optimizer.step();
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(step());
  for (int i = 0; i < 3; ++i) {
    {
      const c10::NoGradGuard no_grad;
      std::unique_ptr<c10::InferenceMode> guard;
      if (inference) guard = std::make_unique<c10::InferenceMode>();
      FSDP_RETURN_IF_ERROR(mode.act(model, optimizer));
    }
    FSDP_RETURN_IF_ERROR(step());
  }
  return model->GatherStateDict();
}

class InferenceModeTest : public ::testing::TestWithParam<InMode> {};

TEST_P(InferenceModeTest, LeavesWhatANoGradGuardLeaves) {
  Options low;
  low.unit.precision = ComputeIn(at::kBFloat16);
  low.unit.precision.buffer_dtype = at::kBFloat16;
  low.unit.precision.keep_full_precision = nullptr;
  Options full_in_eval = low;
  full_in_eval.unit.precision.full_precision_in_eval = true;
  for (const Options& options : {Options(), low, full_in_eval}) {
    const auto check = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const StateDict expected,
                            TrainAround(world, options, GetParam(), false));
      FSDP_ASSIGN_OR_RETURN(const StateDict actual,
                            TrainAround(world, options, GetParam(), true));
      for (const auto& item : expected) {
        FSDP_RETURN_IF_ERROR(
            Check(!actual[item.key()].is_inference() &&
                      at::equal(actual[item.key()], item.value()),
                  item.key()));
      }
      return absl::OkStatus();
    };
    EXPECT_OK(RunAllRanks(kRanks, check));
    EXPECT_OK(AllOk(RunRanks(CreateSharedMemoryGroup(kRanks).value(), check)));
  }
}

INSTANTIATE_TEST_SUITE_P(All, InferenceModeTest, ::testing::ValuesIn(kInMode),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::testing
