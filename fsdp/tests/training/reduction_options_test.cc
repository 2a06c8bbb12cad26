// How gradients are reduced: hooks and divisors.

#include "fsdp/gradient_sync.h"
#include "fsdp/testing/plain_oracle.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;

TEST(ReductionHookTest, CompressedReductionsTrainAlikeWithAndWithoutReplicas) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kHybridShard}) {
    EXPECT_OK(RunAllRanks(4, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
      Options options = BlockUnits();
      options.unit.strategy = strategy;
      TrainingPlan plan;
      plan.adam = false;
      plan.prepare = [](ShardedModuleBase& model) {
        return model.SetReductionHooks(CompressedReduceScatter(at::kBFloat16),
                                       CompressedAllReduce(at::kBFloat16));
      };
      FSDP_RETURN_IF_ERROR(CheckAgainstPlain(plan, mesh, options,
                                             /*relative=*/0.02,
                                             /*absolute=*/0.005));
      // Rounding shows that the hooks were called.
      return CheckAgainstPlain(plan, mesh, options, 1e-7, 1e-8).ok()
                 ? absl::InternalError("nothing was rounded")
                 : absl::OkStatus();
    }));
  }
}

TEST(ReductionHookTest, AreSetOnce) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(MakeNet(kDim, 1), Unowned(world), BlockUnits()));
    FSDP_RETURN_IF_ERROR(
        model->SetReductionHooks(CompressedReduceScatter(at::kHalf)));
    const absl::Status second =
        model->SetReductionHooks(CompressedReduceScatter(at::kHalf));
    return CheckThat(second, StatusIs(absl::StatusCode::kFailedPrecondition, _),
                     "status of a second call");
  }));
}

TEST(DivideFactorsTest, AnySplitGivesTheMeanAndOneGivesTheSum) {
  for (const double before : {1.0, 2.0, 3.0, 8.0}) {
    EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
      Options options = BlockUnits();
      options.gradients.predivide_factor = before;
      FSDP_RETURN_IF_ERROR(CheckAgainstPlain(TrainingPlan(), mesh, options));
      TrainingPlan set_later;
      set_later.prepare = [&](ShardedModuleBase& model) {
        return model.SetGradientDivideFactors(before, 3 / before);
      };
      return CheckAgainstPlain(set_later, mesh, BlockUnits());
    }));
  }
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    const auto gradient = [&](std::optional<double> factor) {
      Options options = BlockUnits();
      options.gradients.divide_factor = factor;
      auto model =
          ValueOrThrow(FullyShard(MakeNet(kDim, 1), Unowned(world), options));
      const at::Tensor x = Rows(world.rank(), 4, kDim);
      ThrowIfError(model->Backward(Loss(model->forward(x), x)));
      return model->Ranges().front().values.grad().clone();
    };
    return CheckTensor(gradient(1.0), gradient(std::nullopt) * 3, 1e-5, 1e-8,
                       "sum of gradients");
  }));
}

// fp16 cannot hold a sum over ranks of 40,000 each.
TEST(DivideFactorsTest, InFp16APartComesBeforeTheReductionWhateverTheFactor) {
  for (const std::optional<double> factor : {std::optional<double>(), {2.0}}) {
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      Options options;
      options.unit.precision.reduce_dtype = at::kHalf;
      options.gradients.divide_factor = factor;
      torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(linear, Unowned(world), options));
      FSDP_RETURN_IF_ERROR(
          model->Backward(model->forward(at::full({1, 1}, 4e4)).sum()));
      const at::Tensor shard = model->Ranges().front().values;
      return shard.numel() == 0 || shard.grad().item<double>() == 4e4
                 ? absl::OkStatus()
                 : absl::InternalError(
                       absl::StrCat(shard.grad().item<double>()));
    }));
  }
}

TEST(DivideFactorsTest, HaveToBePositive) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options;
    options.gradients.divide_factor = 0;
    const absl::Status status =
        FullyShard(MakeNet(kDim, 1), Unowned(world), options).status();
    return CheckThat(status, StatusIs(absl::StatusCode::kInvalidArgument, _),
                     "status of FullyShard()");
  }));
}

}  // namespace
}  // namespace fsdp::testing
