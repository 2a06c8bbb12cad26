#include "fsdp/state/full_params.h"

#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/precision/mixed_precision.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/sharded_toy.h"
#include "fsdp/tests/state/full_params_checks.h"

namespace fsdp::testing {
namespace {

using ::fsdp::testing::toy::CheckAllFreed;
using ::fsdp::testing::toy::IsFreed;
using ::fsdp::testing::toy::kBlocks;
using ::fsdp::testing::toy::kDim;
using ::fsdp::testing::toy::MakeModel;
using ::fsdp::testing::toy::Model;

TEST(SummonFullParamsTest, ShowsWholeLeavesUnderTheirOwnNamesThenNothing) {
  for (const int world_size : {1, 2, 3, 5}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      {
        FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
        FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
        for (const at::Tensor& p : model.module()->parameters()) {
          FSDP_RETURN_IF_ERROR(
              Check(p.is_leaf() && p.requires_grad(), "not a leaf"));
        }
      }
      FSDP_RETURN_IF_ERROR(CheckAllFreed(*model.module()));
      return Check(model->memory_stats().parameters.in_use_bytes == 0, "left");
    }));
  }
}

TEST(SummonFullParamsTest, IsInFullPrecisionWhateverIsComputedIn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.unit.strategy = ShardingStrategy::kShardGradOp;
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
    const at::Tensor x = Rows(0, 2, kDim);
    c10::NoGradGuard no_grad;
    const at::Tensor before = model->forward(x);
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
      for (at::Tensor& p : model.module()->parameters()) p.mul_(2);
    }
    const at::Tensor after = model->forward(x);
    // The low-precision copy from before must not be used.
    return Check(
        after.scalar_type() == at::kBFloat16 && !at::allclose(before, after),
        "the low-precision copy is stale");
  }));
}

TEST(SummonFullParamsTest, OfAModuleInsideShowsItsUnitsOnly) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    torch::nn::Module& block = *model.module()->blocks[0];
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full, SummonFullParams(block));
    FSDP_RETURN_IF_ERROR(Check(!IsFreed(block.parameters().front()), "freed"));
    return CheckAllFreed(*model.module()->blocks[1]);
  }));
}

TEST(SummonFullParamsTest, WithoutRecursionShowsWhatTheUnitOwns) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    SummonOptions options;
    options.recurse = false;
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                          SummonFullParams(*model.module(), options));
    FSDP_RETURN_IF_ERROR(Check(!IsFreed(model.module()->head->weight), "head"));
    return CheckAllFreed(*model.module()->blocks);
  }));
}

TEST(SummonFullParamsTest, WithoutAnythingShardedDoesNothing) {
  torch::nn::Linear plain(kDim, kDim);
  ASSERT_OK_AND_ASSIGN(FullParamsScope full, SummonFullParams(*plain));
  EXPECT_OK(full.Close());
}

// A plain module may contain several sharded models.
TEST(SummonFullParamsTest, TakesSeveralRootsAtOnce) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model first, MakeModel(world));
    FSDP_ASSIGN_OR_RETURN(Model second, MakeModel(world));
    torch::nn::ModuleList both(first.ptr(), second.ptr());
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, SummonFullParams(*both));
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*first.module()));
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*second.module()));
    }
    FSDP_RETURN_IF_ERROR(CheckAllFreed(*first.module()));
    return CheckAllFreed(*second.module());
  }));
}

absl::Status CheckSummonedGradients(Communicator& world, bool offload,
                                    bool rank0_only) {
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
  FSDP_RETURN_IF_ERROR(Backward(model));
  const auto plain = MakeNet(kDim, kBlocks);
  const int world_size = world.world_size();
  for (int rank = 0; rank < world_size; ++rank) {
    const at::Tensor x = Rows(rank, 3, kDim);
    (Loss(plain->forward(x), x) / world_size).backward();
  }
  SummonOptions options;
  options.with_grads = true;
  options.offload_to_cpu = offload;
  options.rank0_only = rank0_only;
  {
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                          model->SummonFullParams(options));
    const bool has_values = !rank0_only || world.rank() == 0;
    for (const auto& item : model.module()->named_parameters()) {
      at::Tensor gradient = item.value().grad();
      FSDP_RETURN_IF_ERROR(Check(gradient.defined() == has_values, item.key()));
      if (!has_values) continue;
      FSDP_RETURN_IF_ERROR(
          Check(at::allclose(gradient,
                             plain->named_parameters().find(item.key())->grad(),
                             1e-4, 1e-6),
                "gradient of " + item.key()));
      gradient.fill_(2);
    }
    FSDP_RETURN_IF_ERROR(full.Close());
  }
  for (const TensorRange& named : model->Ranges()) {
    FSDP_RETURN_IF_ERROR(
        Check((named.values.grad() == 2).all().item<bool>(),
              "gradients are not written back: " + named.name));
  }
  return absl::OkStatus();
}

TEST(SummonFullParamsTest, GradientsAreSeenAndWrittenBackAlsoOffloaded) {
  for (const bool offload : {false, true}) {
    for (const bool rank0_only : {false, true}) {
      EXPECT_OK(RunAllRanks(3, [&](Communicator& world) {
        return CheckSummonedGradients(world, offload, rank0_only);
      }));
    }
  }
}

TEST(SummonFullParamsTest, ParametersWithoutGradientHaveNone) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    SummonOptions options;
    options.with_grads = true;
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                          model->SummonFullParams(options));
    return Check(!model.module()->head->weight.grad().defined(), "made up");
  }));
}

TEST(ForEachFullParameterTest, EditsAreKeptWithWritebackOnly) {
  for (const bool writeback : {false, true}) {
    for (const bool rank0_only : {false, true}) {
      EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
        int visited = 0;
        FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
            [&](const std::string&, const at::Tensor& value) {
              ++visited;
              value.fill_(4);
              return absl::OkStatus();
            },
            VisitOptions{writeback, rank0_only}));
        const int expected = rank0_only && world.rank() != 0 ? 0 : 12;
        FSDP_RETURN_IF_ERROR(Check(visited == expected, "visits"));
        return model->ForEachFullParameter(
            [&](const std::string& name, const at::Tensor& value) {
              return Check((value == 4).all().item<bool>() == writeback, name);
            });
      }));
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
