// Stepping inside backward, unit by unit, equals stepping after it.
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 5;

class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl() : linear(register_module("linear", torch::nn::Linear(kDim, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + linear->forward(x).tanh().matmul(linear->weight);
  }
  torch::nn::Linear linear;
};

// Has units that are used once, twice, at times and never, and frozen
// parameters.
class TestNet : public torch::nn::Module {
 public:
  TestNet()
      : once(register_module("once", std::make_shared<LayerImpl>())),
        twice(register_module("twice", std::make_shared<LayerImpl>())),
        sometimes(register_module("sometimes", std::make_shared<LayerImpl>())),
        never(register_module("never", std::make_shared<LayerImpl>())),
        head(register_module("head", torch::nn::Linear(kDim, kDim))) {
    FillParameters(*this, 1);
    once->linear->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = Forward(twice, Forward(once, Forward(twice, x)));
    if (runs_inside) runs_inside(y);
    if (uses_all) y = Forward(sometimes, y);
    return head->forward(y);
  }
  std::shared_ptr<LayerImpl> once, twice, sometimes, never;
  torch::nn::Linear head;
  bool uses_all = true;
  std::function<void(const at::Tensor&)> runs_inside;
};

using Model = FullyShardedDataParallel<TestNet>;

absl::StatusOr<Model> MakeModel(Communicator& world,
                                ShardingStrategy strategy) {
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
  Options options = UnitsOf<LayerImpl>();
  options.unit.strategy = strategy;
  options.abort_on_failure = false;
  return FullyShard(std::make_shared<TestNet>(), mesh, options);
}

absl::Status Backward(Model& model, int64_t part) {
  const comm::Communicator& world = model->communicator();
  const at::Tensor x = Rows(part * world.world_size() + world.rank(), 2, kDim);
  at::Tensor loss;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      "forward", [&] { loss = model->forward(x).square().mean(); }));
  return model->Backward(loss);
}

// Momentum and decay show a second step, or one with zeros.
std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const Model& model,
                                                       bool adam) {
  if (adam) {
    return std::make_unique<torch::optim::AdamW>(
        model->Parameters(), torch::optim::AdamWOptions(1e-2));
  }
  return std::make_unique<torch::optim::SGD>(
      model->Parameters(),
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
}

absl::Status StepInBackward(Model& model, torch::optim::Optimizer& optimizer) {
  return model->StepInBackward([&optimizer](auto) {
    optimizer.step();
    optimizer.zero_grad();
    return absl::OkStatus();
  });
}

absl::Status CheckEqualShards(const Model& actual, const Model& expected) {
  const std::vector<TensorRange>& shards = actual->Ranges();
  for (size_t i = 0; i < shards.size(); ++i) {
    EXPECT_TRUE(at::equal(shards[i].values, expected->Ranges()[i].values))
        << shards[i].name;
    if (shards[i].values.grad().defined()) {
      return absl::InternalError(absl::StrCat(shards[i].name, " has gradient"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBitEqual(Communicator& world, ShardingStrategy strategy,
                           bool adam) {
  FSDP_ASSIGN_OR_RETURN(Model inside, MakeModel(world, strategy));
  FSDP_ASSIGN_OR_RETURN(Model after, MakeModel(world, strategy));
  const auto optimizer = MakeOptimizer(inside, adam);
  const auto expected = MakeOptimizer(after, adam);
  FSDP_RETURN_IF_ERROR(StepInBackward(inside, *optimizer));
  int64_t part = 0;
  for (int step = 0; step < 5; ++step) {
    for (Model* model : {&inside, &after}) {
      model->module()->uses_all = step % 2 == 0;
      if (step > 2) {
        NoSyncScope no_sync = (*model)->NoSync();
        FSDP_RETURN_IF_ERROR(Backward(*model, part));
        model->module()->uses_all = !model->module()->uses_all;
      }
      FSDP_RETURN_IF_ERROR(Backward(*model, part + 1));
    }
    part += 2;
    expected->step();
    expected->zero_grad();
    FSDP_RETURN_IF_ERROR(CheckEqualShards(inside, after));
  }
  return absl::OkStatus();
}

class BitEqualTest : public ::testing::TestWithParam<ShardingStrategy> {};

TEST_P(BitEqualTest, ToStepsAfterBackward) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const bool adam : {false, true}) {
      EXPECT_OK(RunAllRanks(world_size,
                            [&](Communicator& world) {
                              return CheckBitEqual(world, GetParam(), adam);
                            }))
          << world_size << " ranks";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, BitEqualTest, ::testing::ValuesIn(kStrategies),
                         [](const auto& info) {
                           return absl::StrCat("Strategy", info.index);
                         });

TEST(StepInBackwardTest, StepsEveryTrainableUsedUnitOnce) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, ShardingStrategy::kFullShard));
    std::vector<std::string> stepped;
    FSDP_RETURN_IF_ERROR(
        model->StepInBackward([&](absl::Span<const TensorRange> unit) {
          stepped.push_back(unit.front().name);
          for (const TensorRange& named : unit) {
            named.values.mutable_grad().reset();
          }
          return absl::OkStatus();
        }));
    for (int step = 0; step < 2; ++step) {
      stepped.clear();
      FSDP_RETURN_IF_ERROR(Backward(model, step));
      std::sort(stepped.begin(), stepped.end());
      const std::vector<std::string> expected = {
          "head.weight", "once.linear.weight", "sometimes.linear.weight",
          "twice.linear.weight"};
      EXPECT_EQ(stepped, expected);
    }
    return absl::OkStatus();
  }));
}

TEST(StepInBackwardTest, AFailedStepFailsTheBackwardAndTheNextOneIsWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, ShardingStrategy::kFullShard));
    absl::Status result = absl::DataLossError("no room");
    int steps = 0;
    FSDP_RETURN_IF_ERROR(model->StepInBackward([&](auto) {
      ++steps;
      return result;
    }));
    const absl::Status failed = Backward(model, 0);
    if (!absl::IsDataLoss(failed) || steps != 1) {
      return absl::InternalError(failed.ToString());
    }
    EXPECT_EQ(model->memory_stats().gradients.in_use_bytes, 0);
    result = absl::OkStatus();
    FSDP_RETURN_IF_ERROR(Backward(model, 1));
    return Check(steps == 1 + 4, absl::StrCat(steps, " steps"));
  }));
}

TEST(StepInBackwardTest, RefusesGradientsOfABackwardInsideTheForward) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, ShardingStrategy::kFullShard));
    FSDP_RETURN_IF_ERROR(
        model->StepInBackward([](auto) { return absl::OkStatus(); }));
    absl::Status inside;
    model.module()->runs_inside = [&](const at::Tensor& y) {
      inside = model->Backward(y.sum());
    };
    const absl::Status outside = Backward(model, 0);
    EXPECT_FALSE(outside.ok());
    model.module()->runs_inside = nullptr;
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    return inside;
  };
  EXPECT_THAT(RunRanks(2, run),
              Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                            HasSubstr("a backward inside a forward"))));
}

TEST(StepInBackwardTest, IsSetBetweenStepsOnly) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, ShardingStrategy::kFullShard));
    absl::Status refused;
    model.module()->runs_inside = [&](const at::Tensor&) {
      refused = model->StepInBackward([](auto) { return absl::OkStatus(); });
    };
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    return Check(absl::IsFailedPrecondition(refused), refused.ToString());
  }));
}

TEST(StepInBackwardTest, EndsWithNullAndIsReplacedByAnother) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, ShardingStrategy::kFullShard));
    int first = 0;
    int second = 0;
    const auto count = [](int* steps) {
      return [steps](absl::Span<const TensorRange> unit) {
        ++*steps;
        for (const TensorRange& named : unit)
          named.values.mutable_grad().reset();
        return absl::OkStatus();
      };
    };
    FSDP_RETURN_IF_ERROR(model->StepInBackward(count(&first)));
    FSDP_RETURN_IF_ERROR(model->StepInBackward(count(&second)));
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    FSDP_RETURN_IF_ERROR(model->StepInBackward(nullptr));
    FSDP_RETURN_IF_ERROR(Backward(model, 1));
    const bool has_gradient = model->Parameters().front().grad().defined();
    return Check(first == 0 && second == 4 && has_gradient,
                 absl::StrCat(first, ", ", second));
  }));
}

}  // namespace
}  // namespace fsdp::testing
