// When the user's step inside backward is called, and what it may return.

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 5;

class LayerImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return x + linear->forward(x).tanh().matmul(linear->weight);
  }
  Linear linear = register_module("linear", Linear(kDim, 3));
};

// Has units that are used once, twice and never, and a frozen parameter.
class TestNet : public torch::nn::Module {
 public:
  TestNet()
      : once(register_module("once", std::make_shared<LayerImpl>())),
        twice(register_module("twice", std::make_shared<LayerImpl>())),
        never(register_module("never", std::make_shared<LayerImpl>())),
        head(register_module("head", Linear(kDim, kDim))) {
    FillParameters(*this, 1);
    once->linear->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = Forward(twice, Forward(once, Forward(twice, x)));
    if (runs_inside) runs_inside(y);
    return head->forward(y);
  }
  std::shared_ptr<LayerImpl> once, twice, never;
  Linear head;
  std::function<void(const at::Tensor&)> runs_inside;
};

using Model = FullyShardedDataParallel<TestNet>;

absl::StatusOr<Model> MakeModel(Communicator& world) {
  return FullyShard(std::make_shared<TestNet>(), Unowned(world),
                    GoOn(UnitsOf<LayerImpl>()));
}

absl::Status Backward(Model& model, int64_t part) {
  const Communicator& world = model->communicator();
  const at::Tensor x = Rows(part * world.world_size() + world.rank(), 2, kDim);
  at::Tensor loss;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      "forward", [&] { loss = model->forward(x).square().mean(); }));
  return model->Backward(loss);
}

// Gradients of one unit at a time are alive.
TEST(StepInBackwardTest, StepsEveryTrainableUsedUnitOnce) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    std::vector<std::string> stepped;
    FSDP_RETURN_IF_ERROR(
        model->StepInBackward([&](absl::Span<const TensorRange> unit) {
          stepped.push_back(unit.front().name);
          size_t alive = 0;
          for (const TensorRange& named : model->Ranges()) {
            alive += named.values.grad().defined();
          }
          EXPECT_LE(alive, unit.size());
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
          "head.weight", "once.linear.weight", "twice.linear.weight"};
      EXPECT_EQ(stepped, expected);
    }
    return absl::OkStatus();
  }));
}

TEST(StepInBackwardTest, OfAFusedOptimizerGivesTheBitsOfAStepAfterIt) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model inside, MakeModel(world));
    FSDP_ASSIGN_OR_RETURN(Model after, MakeModel(world));
    FusedAdamW of_units(inside->Parameters());
    FusedAdamW of_all(after->Parameters());
    FSDP_RETURN_IF_ERROR(
        inside->StepInBackward([&](absl::Span<const TensorRange> unit) {
          return of_units.StepUnit(unit);
        }));
    for (int step = 0; step < 3; ++step) {
      FSDP_RETURN_IF_ERROR(Backward(inside, step));
      FSDP_RETURN_IF_ERROR(Backward(after, step));
      of_all.step();
      of_all.zero_grad();
    }
    for (size_t i = 0; i < inside->Ranges().size(); ++i) {
      const at::Tensor& shard = inside->Ranges()[i].values;
      EXPECT_TRUE(at::equal(shard, after->Ranges()[i].values)) << i;
      EXPECT_FALSE(shard.grad().defined()) << i;
    }
    return absl::OkStatus();
  }));
}

TEST(StepInBackwardTest, IsSetBetweenStepsOnly) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
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
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
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
    return Check(first == 0 && second == 3 && has_gradient,
                 absl::StrCat(first, ", ", second));
  }));
}

}  // namespace
}  // namespace fsdp::testing
