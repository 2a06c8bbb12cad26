// What users ask for over a step: units that they hold gathered, and values
// that other ranks write meanwhile.
#include "fsdp/tests/memory/memory_requests.h"

#include <ATen/ops/full_like.h>
#include <torch/optim/sgd.h>

#include <atomic>

#include "absl/synchronization/notification.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::memory_requests {
namespace {

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

// The last rank writes its shards after rank 0 has gone as far as it can
// without: to a fence of its next forward, or through it.
class LateRank {
 public:
  explicit LateRank(int steps) : reached_(steps) {}

  // Called by rank 0.
  void Begin(int step) { step_ = step; }
  void Reach() {
    const int step = step_.exchange(-1);
    if (step >= 0) reached_[step].Notify();
  }
  // Called by the late rank.
  absl::Status Await(int step) {
    return Check(reached_[step].WaitForNotificationWithTimeout(kPatience),
                 "rank 0 waits for something else");
  }

 private:
  std::atomic<int> step_{-1};
  std::vector<absl::Notification> reached_;
};

absl::Status TrainWith(const Request& request, const Way& way,
                       Communicator& world, LateRank& late, int steps) {
  const bool is_first = world.rank() == 0;
  const auto reach = [&late, is_first] {
    if (is_first) late.Reach();
  };
  FSDP_ASSIGN_OR_RETURN(
      Net model,
      FullyShard(MakeNet(kDim, kBlocks), WithToldFences(Unowned(world), reach),
                 OptionsFor(way)));
  torch::optim::SGD optimizer(model->Parameters(), kRate);
  Plain plain(world.world_size(), way.is_bf16);
  for (int step = 0; step < steps; ++step) {
    const at::Tensor x = Plain::Data(step, world.rank());
    model->zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    FSDP_RETURN_IF_ERROR(request.before(model));
    // Without common memory, a gather waits for all ranks anyway.
    if (way.shares && world.rank() + 1 == world.world_size()) {
      FSDP_RETURN_IF_ERROR(late.Await(step));
    }
    optimizer.step();
    plain.Step(step);
    {
      c10::NoGradGuard no_grad;
      for (const TensorRange& named : model->Ranges()) {
        named.values.mul_(Plain::Growth(step));
      }
      if (is_first) late.Begin(step);
      const at::Tensor output = model->forward(x);
      reach();
      const at::Tensor expected = plain.Output(request, x).to(at::kFloat);
      const at::Tensor off = output.to(at::kFloat) - expected;
      const double tolerance = way.is_bf16 ? 0.05 : 1e-5;
      if (!(off.norm() < tolerance * expected.norm()).item<bool>()) {
        return Fail(absl::StrCat("step ", step, ": other values than those of ",
                                 "plain LibTorch"));
      }
    }
    FSDP_RETURN_IF_ERROR(request.after(model));
  }
  return absl::OkStatus();
}

class RequestTest : public ::testing::TestWithParam<int> {};

TEST_P(RequestTest, EveryRankComputesWithFinishedWritesOrTheValuesAskedFor) {
  constexpr int kSteps = 3;
  for (const Way& way : Ways()) {
    for (const Request& request : Requests()) {
      ASSERT_OK_AND_ASSIGN(const Group group, MakeGroup(way, GetParam()));
      LateRank late(kSteps);
      EXPECT_OK(AllOk(RunRanks(group,
                               [&](Communicator& world) {
                                 return TrainWith(request, way, world, late,
                                                  kSteps);
                               })))
          << way.name << ", " << request.name;
    }
  }
}

// A rank writes after its own request without waiting for other ranks'
// requests.
absl::Status WriteAfterAsking(const Way& way, Communicator& world,
                              absl::Notification& written) {
  FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                              Unowned(world), OptionsFor(way)));
  c10::NoGradGuard no_grad;
  torch::nn::Module& block = Block(model, 1);
  // Allocates first, because that is collective.
  FSDP_RETURN_IF_ERROR(UnshardAndWait(block));
  FSDP_RETURN_IF_ERROR(Reshard(block));
  const auto write = [&](double value) {
    for (const TensorRange& named : model->Ranges()) {
      named.values.fill_(value);
    }
  };
  write(1);
  if (world.rank() > 0 && !written.WaitForNotificationWithTimeout(kPatience)) {
    return Fail("rank 0 waits for the others");
  }
  FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(block));
  write(2);
  if (world.rank() == 0) written.Notify();
  FSDP_RETURN_IF_ERROR(handle.Wait());
  write(3);
  const at::Tensor weight = block.as<BlockImpl>()->fc->weight;
  if (!at::equal(weight, at::full_like(weight, 1))) {
    return Fail(absl::StrCat(weight.min().item<float>(), " to ",
                             weight.max().item<float>(), " instead of 1"));
  }
  return Reshard(block);
}

TEST_P(RequestTest, AUnitHasTheValuesOfTheTimeOfUnshard) {
  for (const Way& way : Ways()) {
    ASSERT_OK_AND_ASSIGN(const Group group, MakeGroup(way, GetParam()));
    absl::Notification written;
    EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) {
      return WriteAfterAsking(way, world, written);
    }))) << way.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, RequestTest, ::testing::Values(2, 3));

}  // namespace

}  // namespace fsdp::testing::memory_requests
