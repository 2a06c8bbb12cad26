// Steps with checkpointed regions: around the whole model, on one rank alone,
// and after an exception. Recomputations leave no changes in buffers.
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>

#include "base/testing/users_error.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/trained_values.h"
#include "fsdp/tests/autograd/checkpoint_scenario.h"

namespace fsdp::testing {
namespace {

// The first event of such a model's backward is a recomputation.
TEST(CheckpointedStepTest, ARegionAroundTheWholeModel) {
  RecordedRanks ranks(2);
  const Scenario scenario = {"", WholeLayer, EachLayer};
  const auto run = [&](Communicator& communicator) -> absl::Status {
    comm::CollectiveLog& log = ranks.logs[communicator.rank()];
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, communicator));
    FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(scenario, communicator));
    for (int step = 0; step < 2; ++step) {
      FSDP_RETURN_IF_ERROR(reference->Backward(LossOf(*reference.get(), step)));
      log.Clear();
      const at::Tensor output =
          Checkpoint([&](const at::Tensor& x) { return model->forward(x); },
                     Rows(step, 2, Layer::kDim));
      FSDP_RETURN_IF_ERROR(model->Backward(output.square().mean()));
      if (communicator.world_size() > 1) {
        FSDP_RETURN_IF_ERROR(CheckCounts(log, scenario));
      }
      FSDP_RETURN_IF_ERROR(CheckGradients(*model, *reference));
    }
    return absl::OkStatus();
  };
  EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
}

// Control flow depends on the data: a rank without a gradient reduces after the
// nested backward.
TEST(CheckpointedStepTest, AUnitInARegionWhoseParametersOnlyOneRankUses) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    Scenario scenario = {"", WholeLayer, EachLayerInARegion};
    const auto skip = [rank = communicator.rank()](Layer& layer,
                                                   const at::Tensor& x) {
      return rank == 0 ? WholeLayer(layer, x) : x * 2;
    };
    Scenario skipping = scenario;
    skipping.layer = skip;
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(skipping, communicator));
    FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model.get(), 0)));
    for (const TensorRange& named : model->Ranges()) {
      if (!named.values.grad().defined()) {
        return absl::InternalError(
            absl::StrCat(named.name, " has no gradient"));
      }
    }
    return CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                     "bytes of parameters after backward");
  }));
}

// Throws when it runs for the `fails_at`-th time.
struct Fuse {
  int fails_at;
  int runs = 0;

  void Run() {
    if (runs++ == fails_at) throw UsersError("blown fuse");
  }
};

LayerBody Fused(Fuse* fuse) {
  return [fuse](Layer& layer, const at::Tensor& x) {
    at::Tensor y = WholeLayer(layer, x);
    fuse->Run();
    return y;
  };
}

// Checks that the step in which a region throws fails, and that the next one is
// exact.
absl::Status CheckExceptionInRegion(Communicator& communicator, int fails_at,
                                    bool through_us) {
  Fuse fuse{fails_at};
  const Scenario scenario = {"", Fused(&fuse), LayersInNestedRegions};
  const Scenario undisturbed = {"", WholeLayer, LayersInNestedRegions};
  FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, communicator));
  FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(undisturbed, communicator));
  const absl::Status status = TorchToStatus("step", [&] {
    const at::Tensor loss = LossOf(*model.get(), 0);
    if (through_us) {
      ThrowIfError(model->Backward(loss));
    } else {
      loss.backward();
    }
  });
  FSDP_RETURN_IF_ERROR(
      CheckThat(status, StatusIs(absl::StatusCode::kUnknown, HasSubstr("fuse")),
                "error"));
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model.get(), 1)));
  FSDP_RETURN_IF_ERROR(CheckThat(model->memory_stats().parameters.in_use_bytes,
                                 Eq(0), "bytes of parameters after backward"));
  FSDP_RETURN_IF_ERROR(reference->Backward(LossOf(*reference.get(), 1)));
  return CheckGradients(*model, *reference);
}

TEST(CheckpointedStepTest, AfterAnExceptionInNestedRegionsTheNextStepIsExact) {
  // The innermost layer runs for each region around it, and all in forward.
  constexpr int kRuns = 3 + 3 + 2 + 1;
  for (int fails_at = 0; fails_at < kRuns; ++fails_at) {
    for (bool through_us : {true, false}) {
      SCOPED_TRACE(absl::StrCat(fails_at, through_us ? " Backward" : " plain"));
      EXPECT_OK(RunAllRanks(2, [&](Communicator& communicator) {
        return CheckExceptionInRegion(communicator, fails_at, through_us);
      }));
    }
  }
}

// Regions keep fewer activations. The parameters in memory are those of one
// unit, the root and a prefetched unit.
TEST(CheckpointedStepTest, RegionsAroundUnitsHoldTheRootAndTwoUnitsAtMost) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    const Scenario scenario = {"", WholeLayer, EachLayerInARegion};
    const Scenario without = {"", WholeLayer, EachLayer};
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, communicator));
    FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(without, communicator));
    for (int step = 0; step < 2; ++step) {
      FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model.get(), step)));
      FSDP_RETURN_IF_ERROR(reference->Backward(LossOf(*reference.get(), step)));
    }
    return CheckThat(model->memory_stats().parameters.peak_in_use_bytes,
                     Le(reference->memory_stats().parameters.peak_in_use_bytes),
                     "peak of bytes of parameters");
  }));
}

// --- Buffers -----------------------------------------------------------------

constexpr int64_t kDim = 5;

// A block with LibTorch's running statistics, and a buffer that every use
// changes.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl()
      : fc(register_module("fc", torch::nn::Linear(kDim, kDim))),
        norm(register_module("norm", torch::nn::BatchNorm1d(kDim))),
        uses(register_buffer("uses", at::zeros({kDim}))) {}
  at::Tensor forward(const at::Tensor& x) {
    {
      const c10::NoGradGuard no_grad;
      uses.mul_(0.5).add_(x.mean(0));
    }
    return norm->forward(fc->forward(x)).tanh();
  }
  torch::nn::Linear fc;
  torch::nn::BatchNorm1d norm;
  at::Tensor uses;
};

at::Tensor StepWith(const CheckpointOptions& options,
                    const std::shared_ptr<BlockImpl>& block) {
  const at::Tensor x = Rows(0, 4, kDim);
  const at::Tensor y = CheckpointWith(
      options, [block](const at::Tensor& x) { return block->forward(x); }, x);
  y.square().sum().backward();
  return block->fc->weight.grad();
}

std::shared_ptr<BlockImpl> MakeBlock() {
  auto block = std::make_shared<BlockImpl>();
  testing::FillParameters(*block, 1);
  return block;
}

TEST(CheckpointBuffersTest, OfModulesThatAreNamed) {
  auto plain = MakeBlock();
  plain->forward(Rows(0, 4, kDim)).square().sum().backward();
  auto block = MakeBlock();
  CheckpointOptions options;
  options.modules = {block};
  EXPECT_TRUE(at::allclose(StepWith(options, block), plain->fc->weight.grad()));
  EXPECT_OK(SameBuffers(*block, *plain));
  EXPECT_EQ(block->norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST(CheckpointBuffersTest, StayAsTheyAreWhereThatIsWanted) {
  auto block = MakeBlock();
  CheckpointOptions options;
  options.modules = {block};
  options.restore_buffers = false;
  StepWith(options, block);
  EXPECT_EQ(block->norm->num_batches_tracked.item<int64_t>(), 2);
}

// A graph that has saved a buffer before may still run backward.
TEST(CheckpointBuffersTest, ArePutBackWithoutCountingAsModified) {
  auto block = MakeBlock();
  block->eval();
  CheckpointOptions options;
  options.modules = {block};
  at::Tensor x = Rows(0, 4, kDim).requires_grad_();
  const at::Tensor before = x * block->norm->running_var;
  CheckpointWith(
      options, [block](const at::Tensor& x) { return block->norm->forward(x); },
      before)
      .square()
      .sum()
      .backward();
  EXPECT_TRUE(x.grad().defined());
}

}  // namespace
}  // namespace fsdp::testing
