#include <ATen/ops/zeros.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <mutex>

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

constexpr int64_t kDim = 3;
constexpr int kBlocks = 2;
constexpr int64_t kRows = 30;  // of all ranks together, per step

using Model = FullyShardedDataParallel<NetImpl>;

// Returns two groups; the second has the biases and options of its own.
template <typename OptionsType>
std::vector<OptimizerParamGroup> GroupsOf(const NamedTensors& parameters,
                                          const OptionsType& of_biases) {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
  for (const auto& [name, tensor] : parameters) {
    const bool is_bias = name.find("bias") != std::string::npos;
    (is_bias ? biases : weights).push_back(tensor);
  }
  return {
      OptimizerParamGroup(weights),
      OptimizerParamGroup(biases, std::make_unique<OptionsType>(of_biases))};
}

struct Kind {
  const char* name;
  std::function<std::unique_ptr<Optimizer>(const NamedTensors&)> make;
};

template <typename Type, typename OptionsType>
Kind KindOf(const char* name, const OptionsType& options,
            const OptionsType& of_biases) {
  return {name, [=](const auto& parameters) {
            return std::make_unique<Type>(GroupsOf(parameters, of_biases),
                                          options);
          }};
}

std::vector<Kind> Kinds() {
  using namespace torch::optim;  // NOLINT: a dozen of names
  return {
      KindOf<torch::optim::AdamW>("AdamW", AdamWOptions(0.01).amsgrad(true),
                                  AdamWOptions(0.02).weight_decay(0)),
      KindOf<Adam>("Adam", AdamOptions(0.01), AdamOptions(0.02)),
      KindOf<SGD>("SGD", SGDOptions(0.1).momentum(0.9),
                  SGDOptions(0.05).momentum(0.5)),
      KindOf<Adagrad>("Adagrad", AdagradOptions(0.1), AdagradOptions(0.05)),
      KindOf<RMSprop>("RMSprop",
                      RMSpropOptions(0.01).momentum(0.9).centered(true),
                      RMSpropOptions(0.02)),
      KindOf<FusedAdamW>("FusedAdamW", AdamWOptions(0.01).amsgrad(true),
                         AdamWOptions(0.02).weight_decay(0)),
      KindOf<FusedSGD>("FusedSGD", SGDOptions(0.1).momentum(0.9),
                       SGDOptions(0.05).momentum(0.5)),
  };
}

// Trains on the same rows whatever the number of ranks, which must divide
// kRows.
absl::Status Train(Model& model, Optimizer& optimizer, int begin, int end) {
  const Communicator& world = model->communicator();
  const int64_t rows = kRows / world.world_size();
  for (int step = begin; step < end; ++step) {
    const at::Tensor x = Rows(step * kRows + world.rank() * rows, rows, kDim);
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    optimizer.step();
  }
  return absl::OkStatus();
}

absl::StatusOr<Model> MakeModel(Communicator& world) {
  return FullyShard(MakeNet(kDim, kBlocks), Unowned(world), BlockUnits());
}

struct Snapshot {
  StateDict model;
  OptimizerStateDict optimizer;
};

Snapshot TrainedOn(int world_size, const Kind& kind, int steps) {
  Snapshot snapshot;
  EXPECT_OK(RunAllRanks(world_size, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    const auto optimizer = kind.make(Shards(*model));
    FSDP_RETURN_IF_ERROR(Train(model, *optimizer, 0, steps));
    FSDP_ASSIGN_OR_RETURN(StateDict dict, model->GatherStateDict());
    FSDP_ASSIGN_OR_RETURN(auto state, model->GatherOptimizerState(*optimizer));
    if (world.rank() == 0) snapshot = {dict, state};
    return absl::OkStatus();
  }));
  return snapshot;
}

absl::Status CheckClose(const StateDict& actual, const StateDict& expected) {
  if (actual.size() != expected.size()) {
    return absl::InternalError(
        absl::StrCat(actual.size(), " tensors, not ", expected.size()));
  }
  for (const auto& item : expected) {
    const at::Tensor* value = actual.find(item.key());
    if (value != nullptr && value->sizes() == item.value().sizes() &&
        at::allclose(*value, item.value(), 1e-4, 1e-5)) {
      continue;
    }
    return absl::InternalError(absl::StrCat(item.key(), " differs"));
  }
  return absl::OkStatus();
}

class KindTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(All, KindTest, ::testing::ValuesIn(Kinds()),
                         [](const auto& info) {
                           return std::string(info.param.name);
                         });

// Trains a new model from the third step to the sixth.
absl::StatusOr<StateDict> GoesOn(Communicator& world, const Kind& kind,
                                 const Snapshot& half) {
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
  const auto optimizer = kind.make(Shards(*model));
  FSDP_RETURN_IF_ERROR(model->LoadStateDict(half.model));
  FSDP_RETURN_IF_ERROR(model->LoadOptimizerState(*optimizer, half.optimizer));
  FSDP_RETURN_IF_ERROR(Train(model, *optimizer, 3, 6));
  return model->GatherStateDict();
}

TEST_P(KindTest, TrainingGoesOnWithAnotherNumberOfRanks) {
  const Snapshot unbroken = TrainedOn(3, GetParam(), 6);
  const Snapshot half = TrainedOn(3, GetParam(), 3);
  for (const int world_size : {2, 3, 5}) {
    EXPECT_OK(RunAllRanks(world_size, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const auto dict, GoesOn(world, GetParam(), half));
      if (world_size == 3) {
        // The result equals an unbroken training's, bit for bit.
        for (const auto& item : unbroken.model) {
          EXPECT_TRUE(at::equal(dict[item.key()], item.value())) << item.key();
        }
      }
      return CheckClose(dict, unbroken.model);
    }));
  }
}

TEST_P(KindTest, PiecesMoveBetweenNumbersOfRanks) {
  std::mutex mutex;
  std::vector<TensorRange> pieces;
  ShardedOptimizerState any;
  const Snapshot expected = TrainedOn(3, GetParam(), 2);
  EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    const auto optimizer = GetParam().make(Shards(*model));
    FSDP_RETURN_IF_ERROR(Train(model, *optimizer, 0, 2));
    FSDP_ASSIGN_OR_RETURN(ShardedOptimizerState state,
                          model->MakeShardedOptimizerState(*optimizer));
    const std::lock_guard<std::mutex> lock(mutex);
    for (TensorRange& piece : state.tensors) {
      pieces.push_back(std::move(piece));
    }
    any = std::move(state);
    return absl::OkStatus();
  }));
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    const auto optimizer = GetParam().make(Shards(*model));
    FSDP_RETURN_IF_ERROR(model->LoadShardedOptimizerState(
        *optimizer, pieces, any.numbers, any.groups));
    FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict state,
                          model->GatherOptimizerState(*optimizer));
    return CheckClose(state.tensors, expected.optimizer.tensors);
  }));
}

TEST(OptimizerStateTest, MovesBetweenAFusedOptimizerAndLibTorchs) {
  const std::vector<Kind> kinds = Kinds();
  for (const auto& [from, to] : {std::pair(0, 5), {5, 0}}) {
    const Snapshot half = TrainedOn(3, kinds[from], 3);
    const Snapshot unbroken = TrainedOn(3, kinds[from], 6);
    EXPECT_OK(RunAllRanks(2, [&, to = to](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const auto dict, GoesOn(world, kinds[to], half));
      return CheckClose(dict, unbroken.model);
    }));
  }
}

TEST(OptimizerStateTest, OptionsOfGroupsAreLoadedToo) {
  const Kind kind = Kinds().front();
  const Snapshot snapshot = TrainedOn(2, kind, 1);
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    const auto optimizer = kind.make(Shards(*model));
    for (OptimizerParamGroup& group : optimizer->param_groups()) {
      group.options().set_lr(7);
    }
    FSDP_RETURN_IF_ERROR(
        model->LoadOptimizerState(*optimizer, snapshot.optimizer));
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0.01);
    return CheckThat(optimizer->param_groups()[1].options().get_lr(), Eq(0.02),
                     "rate of group 1");
  }));
}

TEST(OptimizerStateTest, FrozenParametersHaveNoneAndRank0MayHaveItAlone) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(model->SetTrainable("head.weight", false));
    const auto optimizer = Kinds().front().make(Shards(*model));
    FSDP_RETURN_IF_ERROR(Train(model, *optimizer, 0, 1));
    StateDictOptions options;
    options.rank0_only = true;
    FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict state,
                          model->GatherOptimizerState(*optimizer, options));
    EXPECT_FALSE(state.tensors.contains("head.weight.exp_avg"));
    EXPECT_EQ(state.tensors.contains("head.bias.exp_avg"), world.rank() == 0);
    return Check(state.tensors.is_empty() == (world.rank() != 0), "states");
  }));
}

// An action on a model, and a part of its error.
using Misuse = std::pair<std::function<absl::Status(Model&)>, const char*>;

std::vector<Misuse> Misuses(const OptimizerStateDict& state) {
  return {
      {[](Model& model) {
         torch::optim::AdamW other(MakeNet(kDim, 1)->parameters());
         return model->GatherOptimizerState(other).status();
       },
       "no shard of this model"},
      {[](Model& model) {
         torch::optim::LBFGS lbfgs(model->Parameters());
         lbfgs.state()[model->Parameters()[0].unsafeGetTensorImpl()] =
             std::make_unique<torch::optim::LBFGSParamState>();
         return model->GatherOptimizerState(lbfgs).status();
       },
       "is not known"},
      {[state](Model& model) {
         torch::optim::AdamW one_group(model->Parameters());
         return model->LoadOptimizerState(one_group, state);
       },
       "make its groups as they were"},
      {[state](Model& model) {
         const auto sgd = Kinds()[2].make(Shards(*model));
         return model->LoadOptimizerState(*sgd, state);
       },
       "of another class of optimizer"},
      {[state](Model& model) {
         const auto adamw = Kinds()[0].make(Shards(*model));
         OptimizerStateDict wrong = state;
         wrong.tensors["head.bias.exp_avg"] = at::zeros({kDim + 1});
         return model->LoadOptimizerState(*adamw, wrong);
       },
       "head.bias.exp_avg: shape [4] instead of [3]"},
      {[state](Model& model) {
         const auto adamw = Kinds()[0].make(Shards(*model));
         OptimizerStateDict wrong = state;
         wrong.tensors.erase("head.bias.exp_avg_sq");
         return model->LoadOptimizerState(*adamw, wrong);
       },
       "head.bias: its state has no exp_avg_sq"},
      {[state](Model& model) {
         const auto adamw = Kinds()[0].make(Shards(*model));
         OptimizerStateDict wrong = state;
         wrong.tensors.erase("head.weight.max_exp_avg_sq");
         return model->LoadOptimizerState(*adamw, wrong);
       },
       "head.weight: its state has no max_exp_avg_sq"},
      {[](Model& model) {
         const auto rmsprop = Kinds()[4].make(Shards(*model));
         ThrowIfError(Train(model, *rmsprop, 0, 1));
         OptimizerStateDict wrong =
             ValueOrThrow(model->GatherOptimizerState(*rmsprop));
         wrong.tensors.erase("head.weight.grad_avg");
         return model->LoadOptimizerState(*rmsprop, wrong);
       },
       "head.weight: its state has no grad_avg"},
      {[state](Model& model) {
         const auto adamw = Kinds()[0].make(Shards(*model));
         OptimizerStateDict wrong = state;
         wrong.tensors["head.bias.exp_avg"] = at::empty({kDim}, at::kMeta);
         return model->LoadOptimizerState(*adamw, wrong);
       },
       "head.bias.exp_avg: a tensor on meta has no values"},
      // No slot exists yet that could show it.
      {[](Model& model) {
         const auto adamw = Kinds()[0].make(Shards(*model));
         const auto sgd = Kinds()[2].make(Shards(*model));
         OptimizerStateDict other =
             ValueOrThrow(model->GatherOptimizerState(*sgd));
         return model->LoadOptimizerState(*adamw, other);
       },
       "of another class of optimizer"},
      {[state](Model& model) {
         const auto adamw = Kinds()[0].make(Shards(*model));
         OptimizerStateDict wrong = state;
         for (OptimizerGroup& group : wrong.groups) group.options = nullptr;
         return model->LoadOptimizerState(*adamw, wrong);
       },
       "of another class of optimizer"},
      {[](Model& model) {
         const auto adamw = Kinds()[0].make(Shards(*model));
         const std::vector<TensorRange> transposed = {
             {"head.weight.exp_avg",
              {kDim, kDim},
              {1, kDim},
              0,
              at::zeros({kDim * kDim})}};
         return model->LoadShardedOptimizerState(
             *adamw, transposed, {},
             ValueOrThrow(model->GatherOptimizerState(*adamw)).groups);
       },
       "strides [1, 3] instead of [3, 1]"},
  };
}

TEST(OptimizerStateTest, WhatDoesNotFitIsRefusedOnAllRanks) {
  const Snapshot snapshot = TrainedOn(2, Kinds()[0], 1);
  for (const auto& [misuse, text] : Misuses(snapshot.optimizer)) {
    const auto run = [&,
                      &misuse = misuse](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      return misuse(model);
    };
    EXPECT_THAT(RunRanks(2, run), AllRefuse(text, Code::kInvalidArgument));
  }
}

}  // namespace
}  // namespace fsdp::testing
