// When the user's step inside backward is called, and what it may return.
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

// Has units that are used once, twice and never, and a frozen parameter.
class TestNet : public torch::nn::Module {
 public:
  TestNet()
      : once(register_module("once", std::make_shared<LayerImpl>())),
        twice(register_module("twice", std::make_shared<LayerImpl>())),
        never(register_module("never", std::make_shared<LayerImpl>())),
        head(register_module("head", torch::nn::Linear(kDim, kDim))) {
    FillParameters(*this, 1);
    once->linear->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = Forward(twice, Forward(once, Forward(twice, x)));
    if (runs_inside) runs_inside(y);
    return head->forward(y);
  }
  std::shared_ptr<LayerImpl> once, twice, never;
  torch::nn::Linear head;
  std::function<void(const at::Tensor&)> runs_inside;
};

using Model = FullyShardedDataParallel<TestNet>;

absl::StatusOr<Model> MakeModel(Communicator& world) {
  Options options = UnitsOf<LayerImpl>();
  options.abort_on_failure = false;
  return FullyShard(std::make_shared<TestNet>(), Unowned(world), options);
}

absl::Status Backward(Model& model, int64_t part) {
  const comm::Communicator& world = model->communicator();
  const at::Tensor x = Rows(part * world.world_size() + world.rank(), 2, kDim);
  at::Tensor loss;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      "forward", [&] { loss = model->forward(x).square().mean(); }));
  return model->Backward(loss);
}

TEST(StepInBackwardTest, StepsEveryTrainableUsedUnitOnce) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
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
          "head.weight", "once.linear.weight", "twice.linear.weight"};
      EXPECT_EQ(stepped, expected);
    }
    return absl::OkStatus();
  }));
}

TEST(StepInBackwardTest, AFailedStepFailsTheBackwardAndTheNextOneIsWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
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
    return Check(steps == 1 + 3, absl::StrCat(steps, " steps"));
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
