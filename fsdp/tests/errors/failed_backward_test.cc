// The gradients after a forward or backward that has failed, while ranks go on:
// those of the units that it has passed, as LibTorch's leaves have them, and
// all that were there before.
#include <torch/types.h>

#include <stdexcept>

#include "absl/synchronization/notification.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/model/forward.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

constexpr int kBlocks = 4;
constexpr absl::Duration kPatience = absl::Seconds(30);

constexpr int kHoldsAt = 3;

// Computes head(blocks(x)). Backward throws when the gradient leaves block
// `throws_at`.
class ThrowingImpl : public torch::nn::Module {
 public:
  ThrowingImpl() : head(register_module("head", Linear(kDim, kDim))) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<BlockImpl>(kDim)));
    }
    FillParameters(*this, 0);
  }

  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < kBlocks; ++i) {
      if (i == kHoldsAt && hold != nullptr) {
        x.register_hook([this](const at::Tensor&) { hold(); });
      }
      if (i == throws_at && x.requires_grad()) {
        x.register_hook([this](const at::Tensor&) -> at::Tensor {
          on_throw();
          throw std::runtime_error("a bad batch");
        });
      }
      x = Forward(*blocks[i], x);
    }
    return head->forward(x);
  }

  std::vector<std::shared_ptr<BlockImpl>> blocks;
  Linear head;
  int throws_at = -1;
  std::function<void()> on_throw = [] {};
  std::function<void()> hold;  // before the gradient enters block 2
};
using Model = FullyShardedDataParallel<ThrowingImpl>;

// Each micro-step has a letter: S synchronizes, N does not; f fails in forward,
// s and n fail in backward, after blocks 3 and 2.
constexpr int kFailsAt = 2;
bool FailsInBackward(char step) { return step == 's' || step == 'n'; }

at::Tensor Data(int step, int rank) {
  return Rows(step * 50 + rank * 7, 3, kDim);
}

// Computes one rank with plain LibTorch, and adds its share. A backward that
// fails has not passed the root, which is on both sides of its blocks.
void RunPlain(const std::string& steps, int rank, int ranks, Gradients& means) {
  ThrowingImpl plain;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i] == 'f') continue;
    const at::Tensor x = Data(static_cast<int>(i), rank);
    const bool fails = FailsInBackward(steps[i]);
    plain.throws_at = fails ? kFailsAt : -1;
    std::vector<at::Tensor> before;
    for (at::Tensor& parameter : plain.head->parameters()) {
      before.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                                  : at::Tensor());
    }
    const at::Tensor loss = Loss(plain.forward(x), x);
    const absl::Status status = TorchToStatus("b", [&] { loss.backward(); });
    ThrowIfError(Check(status.ok() != fails, "plain LibTorch"));
    for (size_t k = 0; fails && k < before.size(); ++k) {
      plain.head->parameters()[k].mutable_grad() = before[k];
    }
  }
  AddShare(plain, ranks, means);
}

absl::Status CheckGradients(Model& model, const std::string& steps, int ranks) {
  Gradients means;
  for (int rank = 0; rank < ranks; ++rank) RunPlain(steps, rank, ranks, means);
  // What has failed may leave zeros.
  for (const TensorRange& named : model->Ranges()) {
    if (!named.values.grad().defined()) continue;
    means.emplace(named.name, at::zeros(named.sizes));
  }
  return Annotate(CheckOwnGradients(*model, means), steps);
}

enum class By { kModel, kLoss };  // Backward() or loss.backward()

absl::Status RunStep(Model& model, char step, int index, int rank, By by) {
  if (step == 'f') {
    const absl::Status status =
        TorchToStatus("forward", [&] { model->forward(Rows(0, 3, kDim + 1)); });
    return Check(!status.ok(), "a wrong shape is accepted");
  }
  std::optional<NoSyncScope> no_sync;
  if (step == 'N' || step == 'n') no_sync.emplace(model->NoSync());
  model.module()->throws_at = FailsInBackward(step) ? kFailsAt : -1;
  const at::Tensor x = Data(index, rank);
  const at::Tensor loss = Loss(model->forward(x), x);
  const absl::Status status =
      by == By::kModel ? model->Backward(loss)
                       : TorchToStatus("b", [&] { loss.backward(); });
  return Check(status.ok() != FailsInBackward(step), status.ToString());
}

struct Place {
  std::string name;
  int world_size;
  bool in_one_host;
  ShardingStrategy strategy;
};

absl::StatusOr<Model> Shard(Communicator& world, ShardingStrategy strategy) {
  Options options = GoOn();
  options.unit.strategy = strategy;
  if (strategy == ShardingStrategy::kHybridShard) {
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world), {{"replicate", -1}, {"shard", 2}}));
    return FullyShard(std::make_shared<ThrowingImpl>(), mesh, options);
  }
  return FullyShard(std::make_shared<ThrowingImpl>(), Unowned(world), options);
}

class FailedStepTest : public ::testing::TestWithParam<Place> {};

TEST_P(FailedStepTest, LeavesTheGradientsThatPlainLibTorchHas) {
  for (const char* steps : {"SfS", "NfS", "NfNS", "SNfS", "fS", "sS", "SsS",
                            "NsS", "NnS", "NnfS", "nS", "NsNS", "SnsS"}) {
    for (const By by : {By::kModel, By::kLoss}) {
      const Place& place = GetParam();
      ASSERT_OK_AND_ASSIGN(const auto group,
                           MakeGroup(place.world_size, place.in_one_host));
      EXPECT_OK(AllOk(RunRanks(
          group,
          [&](Communicator& world) -> absl::Status {
            FSDP_ASSIGN_OR_RETURN(Model model, Shard(world, place.strategy));
            const std::string all = steps;
            for (size_t i = 0; i < all.size(); ++i) {
              FSDP_RETURN_IF_ERROR(RunStep(model, all[i], static_cast<int>(i),
                                           world.rank(), by));
            }
            return CheckGradients(model, all, world.world_size());
          })))
          << steps << (by == By::kLoss ? " by loss.backward()" : "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FailedStepTest,
    ::testing::Values(
        Place{"Local2", 2, false, ShardingStrategy::kFullShard},
        Place{"Host2", 2, true, ShardingStrategy::kFullShard},
        Place{"Host3", 3, true, ShardingStrategy::kFullShard},
        Place{"LocalShardGradOp", 3, false, ShardingStrategy::kShardGradOp},
        Place{"HostShardOptimizer", 2, true, ShardingStrategy::kShardOptimizer},
        Place{"LocalNoShard", 2, false, ShardingStrategy::kNoShard},
        Place{"LocalHybrid", 4, false, ShardingStrategy::kHybridShard},
        Place{"HostHybrid", 4, true, ShardingStrategy::kHybridShard}),
    [](const auto& info) { return info.param.name; });

// Tells when a rank begins to wait for a reduction.
class ToldWork final : public comm::Work {
 public:
  ToldWork(std::unique_ptr<comm::Work> base, std::function<void()> tell)
      : base_(std::move(base)), tell_(std::move(tell)) {}
  absl::Status Wait(absl::Time deadline) override {
    tell_();
    return base_->Wait(deadline);
  }
  absl::Status WaitForResult(absl::Time deadline) override {
    tell_();
    return base_->WaitForResult(deadline);
  }
  absl::Status BlockCurrentStream() override {
    tell_();
    return base_->BlockCurrentStream();
  }

 private:
  const std::unique_ptr<comm::Work> base_;
  const std::function<void()> tell_;
};

class WithToldReductions final : public comm::ForwardingCommunicator {
 public:
  WithToldReductions(std::shared_ptr<Communicator> base,
                     std::function<void()> tell)
      : ForwardingCommunicator(std::move(base)), tell_(std::move(tell)) {}

 protected:
  comm::StartedWork DoScaledSum(const comm::CollectiveArgs& args,
                                absl::string_view label) override {
    FSDP_ASSIGN_OR_RETURN(auto work, base().StartCollective(args, label));
    return std::make_unique<ToldWork>(std::move(work), tell_);
  }

 private:
  const std::function<void()> tell_;
};

// The last rank continues its backward after rank 0's has failed and rank 0
// either waits for reductions in flight or has zeroed its gradients.
class Late {
 public:
  void BeginToFail() { fails_ = true; }
  void Reach() {
    if (fails_) {
      fails_ = false;
      reached_.Notify();
    }
  }
  void Await() {
    ThrowIfError(Check(reached_.WaitForNotificationWithTimeout(kPatience),
                       "rank 0 waits for something else"));
  }

 private:
  bool fails_ = false;  // whether rank 0 fails
  absl::Notification reached_;
};

absl::Status FailThenMakeZero(Communicator& world, By by, Late& late) {
  const bool is_first = world.rank() == 0;
  const bool is_last = world.rank() + 1 == world.world_size();
  const auto tell = [&] {
    if (is_first) late.Reach();
  };
  FSDP_ASSIGN_OR_RETURN(
      Model model,
      FullyShard(std::make_shared<ThrowingImpl>(),
                 std::make_shared<WithToldReductions>(Unowned(world), tell),
                 GoOn()));
  // From here on gradients exist, and sums are added to them.
  FSDP_RETURN_IF_ERROR(RunStep(model, 'S', 0, world.rank(), by));
  model.module()->on_throw = [&] {
    if (is_first) late.BeginToFail();
  };
  model.module()->throws_at = kFailsAt;
  const at::Tensor x = Data(1, world.rank());
  // Its reduction of block 2 is still to come.
  if (is_last) model.module()->hold = [&] { late.Await(); };
  const at::Tensor loss = Loss(model->forward(x), x);
  const absl::Status status =
      by == By::kModel ? model->Backward(loss)
                       : TorchToStatus("b", [&] { loss.backward(); });
  FSDP_RETURN_IF_ERROR(Check(!status.ok(), "nothing was thrown"));
  model.module()->hold = nullptr;
  model->zero_grad(/*set_to_none=*/false);
  if (is_first) late.Reach();
  model.module()->throws_at = -1;
  FSDP_RETURN_IF_ERROR(RunStep(model, 'S', 0, world.rank(), by));
  return CheckGradients(model, "S", world.world_size());
}

TEST(FailedBackwardTest, NothingIsAddedToGradientsAfterItHasReturned) {
  for (const int world_size : {2, 3}) {
    for (const bool in_one_host : {false, true}) {
      for (const By by : {By::kModel, By::kLoss}) {
        ASSERT_OK_AND_ASSIGN(const auto group,
                             MakeGroup(world_size, in_one_host));
        Late late;
        EXPECT_OK(AllOk(RunRanks(group,
                                 [&](Communicator& world) {
                                   return FailThenMakeZero(world, by, late);
                                 })))
            << world_size << " ranks" << (in_one_host ? " of a host" : "");
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
