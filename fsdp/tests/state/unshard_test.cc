// Units gathered ahead of use: Unshard(), RebuildFullParams().

#include "fsdp/state/whole_model.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/sharded_toy.h"

namespace fsdp::testing::toy {
namespace {

TEST(UnshardTest, TheNextForwardFindsTheUnitAndFreesIt) {
  RecordedRanks ranks(2);
  const auto run = [&](Communicator& world) -> absl::Status {
    comm::CollectiveLog& log = ranks.logs[world.rank()];
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    c10::NoGradGuard no_grad;
    const auto gathers = [&] {
      return log.TotalsOf(comm::Collective::kAllGather, "blocks.1").count;
    };
    log.Clear();
    torch::nn::Module& block = *model.module()->blocks[1];
    FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(block));
    FSDP_RETURN_IF_ERROR(Unshard(block).status());  // once is enough
    FSDP_RETURN_IF_ERROR(handle.Wait());
    FSDP_RETURN_IF_ERROR(Check(!IsFreed(block.parameters().front()), "freed"));
    model->forward(Rows(0, 1, kDim));
    FSDP_RETURN_IF_ERROR(Check(gathers() == 1, "gathered again"));
    FSDP_RETURN_IF_ERROR(CheckAllFreed(block));
    FSDP_RETURN_IF_ERROR(Unshard(block).status());
    FSDP_RETURN_IF_ERROR(Reshard(block));
    FSDP_RETURN_IF_ERROR(CheckAllFreed(block));
    return Check(model->memory_stats().parameters.in_use_bytes == 0, "left");
  };
  EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
}

TEST(UnshardTest, AChildTakenFromASequentialIsItsUnit) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    torch::nn::Sequential net(torch::nn::Linear(kDim, kDim),
                              torch::nn::Linear(kDim, kDim));
    Options options = UnitsOf<torch::nn::LinearImpl>();
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
    FSDP_RETURN_IF_ERROR(Unshard(*net->ptr(0)).status());
    FSDP_RETURN_IF_ERROR(Reshard(*net->ptr(0)));
    FSDP_ASSIGN_OR_RETURN(const FullParamsScope full,
                          SummonFullParams(*net->ptr(0)));
    const at::Tensor weight = net->ptr(0)->parameters().front();
    return Check(weight.numel() == kDim * kDim && !IsFreed(weight), "freed");
  }));
}

TEST(UnshardTest, IsForUnits) {
  torch::nn::Linear plain(kDim, kDim);
  EXPECT_THAT(Unshard(*plain).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("no unit of a sharded model")));
  EXPECT_THAT(Reshard(*plain), StatusIs(absl::StatusCode::kFailedPrecondition,
                                        HasSubstr("no unit")));
}

TEST(RebuildFullParamsTest, IsIdempotentAndTellsWhatMayBeFreed) {
  for (const int world_size : {1, 3}) {
    RecordedRanks ranks(world_size);
    const auto run = [&](Communicator& world) -> absl::Status {
      comm::CollectiveLog& log = ranks.logs[world.rank()];
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      log.Clear();
      FSDP_ASSIGN_OR_RETURN(auto rebuilt, model->RebuildFullParams());
      FSDP_ASSIGN_OR_RETURN(auto again, model->RebuildFullParams());
      FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
      const int units = kBlocks + 1;
      FSDP_RETURN_IF_ERROR(Check(rebuilt.size() == units, "list"));
      for (size_t i = 0; i < rebuilt.size(); ++i) {
        FSDP_RETURN_IF_ERROR(
            Check(rebuilt[i].safe_to_free == (world_size > 1), "safe_to_free"));
        FSDP_RETURN_IF_ERROR(Check(
            rebuilt[i].flat.data_ptr() == again[i].flat.data_ptr(), "moved"));
        FSDP_RETURN_IF_ERROR(
            Check(rebuilt[i].flat.numel() % world_size == 0, "padding"));
      }
      const int64_t gathers = log.TotalsOf(comm::Collective::kAllGather).count;
      FSDP_RETURN_IF_ERROR(
          Check(gathers == (world_size > 1 ? units : 0), "gathered twice"));
      FSDP_RETURN_IF_ERROR(Backward(model));
      return CheckAllFreed(*model.module());
    };
    EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
  }
}

}  // namespace
}  // namespace fsdp::testing::toy
