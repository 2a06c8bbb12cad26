// Sharded models of common kinds, compared with one process that has the data
// of all ranks. Follows the parity tests of fairscale and PyTorch.
#include "fsdp/tests/models/model_zoo.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include "fsdp/options/options.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/toy_transformer.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing::model_zoo {
namespace {

// --- Freezing ----------------------------------------------------------------

// An optimizer leaves alone what has no gradient.
TEST(NestedFreezingTest, ATrunkWhoseGradientsAreDroppedStaysAsItIs) {
  TrainingTask drops = RowsTask();
  drops.before_step = [](const NamedTensors& named) {
    for (const auto& [name, tensor] : named) {
      if (!absl::StartsWith(name, "head")) tensor.mutable_grad().reset();
    }
  };
  for (const int ranks : {2, 3}) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
      return CheckTask<NetImpl>(
          drops, [] { return MakeNet(kDim, 2); }, mesh, BlockUnits());
    }));
  }
}

// --- Uneven parameters -------------------------------------------------------

class UnevenTest : public ::testing::TestWithParam<int> {};

// Nine elements lie over up to eight ranks, some of which have none.
TEST_P(UnevenTest, OneSgdStepOfA3x3WeightIsExact) {
  EXPECT_OK(RunAllRanks(GetParam(), [](Communicator& world) -> absl::Status {
    const auto options = torch::nn::LinearOptions(3, 3).bias(false);
    torch::nn::Linear linear(options);
    FillParameters(*linear, 0);
    torch::nn::Linear expected(options);
    FillParameters(*expected, 0);
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(linear, Unowned(world)));
    int64_t numel = 0;
    for (const at::Tensor& shard : model->Parameters()) numel += shard.numel();
    FSDP_ASSIGN_OR_RETURN(const double all, SumOverRanks(world, numel));
    if (all != 9) return absl::InternalError(absl::StrCat(all, " elements"));

    torch::optim::SGD optimizer(model->Parameters(), 0.5);
    // Every row of the gradient is x; its mean over ranks has few bits.
    const at::Tensor x = at::ones({1, 3}) * (2 * world.rank() + 1);
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    optimizer.step();
    {
      c10::NoGradGuard no_grad;
      expected->weight.sub_(0.5 * world.world_size());
    }
    return model->ForEachFullParameter(
        [&](const std::string&, const at::Tensor& value) {
          return CheckTensor(value, expected->weight, 0, 1e-6, "weight");
        });
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, UnevenTest,
                         ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

// --- Autocast ----------------------------------------------------------------

// While it lives, autocast lets this thread compute in bf16.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() > 0) return;
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

// One region over many steps sees what the optimizer has written: in forward,
// parameters are no leaves, so autocast keeps no copies of them.
TEST(AutocastTest, OneRegionOverAllStepsTrainsAsARegionForEachForward) {
  TrainingTask task = RowsTask();
  task.loss = [](const TensorFunction& forward, int64_t part) {
    const at::Tensor x = Rows(part * 3, 3, kDim);
    const Autocast on;
    const at::Tensor y = forward(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    return Loss(y.to(at::kFloat), x);
  };
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits()));
    auto region = std::make_unique<Autocast>();
    FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, RunSharded(task, model));
    region.reset();
    return CheckSameRecord(
        actual, RunPlain(task, MakeNet(kDim, 2), world.world_size()), 1e-2);
  }));
}

TEST(ModelPropertiesTest, AScopeOfFullParametersLeavesBuffersInTheirDtype) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = LayerUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.unit.precision.buffer_dtype = at::kBFloat16;
    options.unit.precision.keep_full_precision = [](const torch::nn::Module&) {
      return false;
    };
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeTransformer({1, /*batch_norm=*/true}),
                                     Unowned(world), options));
    FSDP_ASSIGN_OR_RETURN(const FullParamsScope full,
                          model->SummonFullParams());
    for (const auto& item : model.module()->named_buffers()) {
      const bool counts = item.value().scalar_type() == at::kLong;
      if (!counts && item.value().scalar_type() != at::kBFloat16) {
        return absl::InternalError(absl::StrCat("buffer ", item.key()));
      }
    }
    for (const auto& item : model.module()->named_parameters()) {
      if (item.value().scalar_type() != at::kFloat) {
        return absl::InternalError(absl::StrCat("parameter ", item.key()));
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace

}  // namespace fsdp::testing::model_zoo
