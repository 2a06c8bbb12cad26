// Units that users hold gathered over a step.
#include <torch/optim/sgd.h>

#include "comm/testing/shared_memory_group.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/state/full_params.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/memory/memory_requests.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::CreateSharedMemoryGroup;
using memory_requests::Block;
using memory_requests::Fail;
using memory_requests::Group;
using memory_requests::kBlocks;
using memory_requests::kDim;
using memory_requests::kRate;
using memory_requests::MakeGroup;
using memory_requests::Net;
using memory_requests::OptionsFor;
using memory_requests::Plain;
using memory_requests::Requests;
using memory_requests::UnshardAndWait;
using memory_requests::Way;
using memory_requests::Ways;
using memory_requests::WithToldFences;

// Backward, or a region's recomputation, would gather new values where forward
// had the old ones.
absl::Status TrainOnOldValues(const Way& way, bool root, bool in_region,
                              Communicator& world) {
  FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                              Unowned(world), OptionsFor(way)));
  torch::nn::Module& unit = root ? *model.module() : Block(model, 1);
  torch::optim::SGD optimizer(model->Parameters(), kRate);
  const at::Tensor x = Plain::Data(0, world.rank());
  FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
  FSDP_RETURN_IF_ERROR(UnshardAndWait(unit));
  optimizer.step();
  {
    c10::NoGradGuard no_grad;
    for (const TensorRange& named : model->Ranges()) {
      named.values.mul_(Plain::Growth(0));
    }
  }
  const auto forward = [&](const at::Tensor& input) {
    return model->forward(input);
  };
  const absl::Status refused = TorchToStatus(
      "forward", [&] { in_region ? Checkpoint(forward, x) : forward(x); });
  if (!::testing::Value(
          refused, StatusIs(absl::StatusCode::kFailedPrecondition,
                            AllOf(HasSubstr(root ? "unit root" : "blocks.1"),
                                  HasSubstr("Reshard() it after writing"))))) {
    return Fail(refused.ToString());
  }
  FSDP_RETURN_IF_ERROR(Reshard(unit));
  // A request after the step has no effect on the values.
  FSDP_RETURN_IF_ERROR(UnshardAndWait(unit));
  model->zero_grad();
  const at::Tensor loss = Loss(model->forward(x), x);
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  optimizer.step();
  Plain plain(world.world_size(), way.is_bf16);
  plain.Step(0);
  c10::NoGradGuard no_grad;
  const at::Tensor expected = Loss(plain.Output(Requests()[0], x), x);
  return Check(
      at::allclose(loss.to(at::kFloat), expected.to(at::kFloat), 0.02, 0.02),
      "another loss");
}

TEST(HeldUnitTest, TrainingOnValuesOfBeforeAStepIsRefusedByEveryBackend) {
  for (const Way& way : Ways()) {
    for (const int kind : {0, 1, 2, 3}) {
      ASSERT_OK_AND_ASSIGN(const Group group, MakeGroup(way, 2));
      EXPECT_OK(AllOk(RunRanks(group,
                               [&](Communicator& world) {
                                 return TrainOnOldValues(way, kind % 2 == 1,
                                                         kind >= 2, world);
                               })))
          << way.name << " " << kind;
    }
  }
}

// A unit that is not sharded is its shard, which cannot be newer.
TEST(HeldUnitTest, AUnitThatIsNotShardedFollowsItsShard) {
  ASSERT_OK_AND_ASSIGN(const Group group, comm::CreateLocalGroup(1));
  EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                                Unowned(world), BlockUnits()));
    FSDP_RETURN_IF_ERROR(model->RebuildFullParams().status());
    {
      c10::NoGradGuard no_grad;
      for (const TensorRange& named : model->Ranges()) named.values.fill_(0);
    }
    const at::Tensor output = model->forward(Rows(0, 2, kDim));
    return Check(output.abs().sum().item<float>() == 0, "old values");
  })));
}

TEST(HeldUnitTest, AStepPassesTwoFences) {
  ASSERT_OK_AND_ASSIGN(const Group group, CreateSharedMemoryGroup(2));
  EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
    int fences = 0;
    FSDP_ASSIGN_OR_RETURN(
        Net model,
        FullyShard(MakeNet(kDim, kBlocks),
                   WithToldFences(Unowned(world), [&fences] { ++fences; }),
                   BlockUnits()));
    for (int step = 0; step < 3; ++step) {
      fences = 0;
      const at::Tensor x = Plain::Data(step, world.rank());
      FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      if (fences != 2) return Fail(absl::StrCat(fences, " fences"));
    }
    return absl::OkStatus();
  })));
}

}  // namespace
}  // namespace fsdp::testing
