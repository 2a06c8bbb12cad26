// Units gathered ahead of use: Unshard(), RebuildFullParams().
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "base/testing/status_check.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/state/full_params.h"
#include "fsdp/testing/sharded_toy.h"
#include "fsdp/testing/toy_model.h"
#include "fsdp/tests/state/full_params_checks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::AllOk;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::Backward;
using ::fsdp::testing::Check;
using ::fsdp::testing::CheckInitialValues;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::fsdp::testing::toy::CheckAllFreed;
using ::fsdp::testing::toy::IsFreed;
using ::fsdp::testing::toy::kBlocks;
using ::fsdp::testing::toy::kDim;
using ::fsdp::testing::toy::MakeModel;
using ::fsdp::testing::toy::Model;
using ::testing::HasSubstr;

TEST(UnshardTest, TheNextForwardFindsTheUnitAndFreesIt) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(2));
  std::vector<comm::CollectiveLog> logs(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    group[rank] = comm::Record(std::move(group[rank]), &logs[rank]);
  }
  const auto run = [&](Communicator& world) -> absl::Status {
    comm::CollectiveLog& log = logs[world.rank()];
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
  EXPECT_OK(AllOk(RunRanks(group, run)));
}

TEST(UnshardTest, AChildTakenFromASequentialIsItsUnit) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    torch::nn::Sequential net(torch::nn::Linear(kDim, kDim),
                              torch::nn::Linear(kDim, kDim));
    Options options;
    options.wrap_policy = WrapModules<torch::nn::LinearImpl>();
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
    ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(world_size));
    std::vector<comm::CollectiveLog> logs(group.size());
    for (size_t rank = 0; rank < group.size(); ++rank) {
      group[rank] = comm::Record(std::move(group[rank]), &logs[rank]);
    }
    const auto run = [&](Communicator& world) -> absl::Status {
      comm::CollectiveLog& log = logs[world.rank()];
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
    EXPECT_OK(AllOk(RunRanks(group, run)));
  }
}

}  // namespace
}  // namespace fsdp
