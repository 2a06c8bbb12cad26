// What users ask for over a step: units that they hold gathered, and values
// that other ranks write meanwhile.
#include <ATen/ops/full_like.h>
#include <torch/optim/sgd.h>

#include <atomic>

#include "absl/synchronization/notification.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;
constexpr double kRate = 0.5;
constexpr absl::Duration kPatience = absl::Seconds(30);
using Net = FullyShardedDataParallel<NetImpl>;
using Group = std::vector<std::unique_ptr<Communicator>>;

// How ranks hold the parameters.
struct Way {
  const char* name;
  bool in_one_host;     // a shared-memory group
  bool shares = false;  // Options::share_memory
  bool is_bf16 = false;
};
constexpr Way kWays[] = {{"local", false},
                         {"local bf16", false, false, true},
                         {"host, gathered", true},
                         {"host, common", true, true},
                         {"host, common bf16", true, true, true}};

// A user makes these calls after backward, before and after the optimizer's
// step. `held` blocks meanwhile have the values from before the step.
struct Request {
  std::string name;
  std::function<absl::Status(Net&)> before;
  std::function<absl::Status(Net&)> after;
  std::vector<int> held;    // blocks
  bool holds_root = false;  // the rest
};

// Plain LibTorch on the data of all ranks.
class Plain {
 public:
  Plain(int ranks, bool is_bf16)
      : ranks_(ranks),
        is_bf16_(is_bf16),
        net_(MakeNet(kDim, kBlocks)),
        before_(MakeNet(kDim, kBlocks)) {}

  void Step(int step) {
    CopyInto(*before_);
    torch::optim::SGD optimizer(net_->parameters(), kRate);
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks_; ++rank) {
      const at::Tensor x = Data(step, rank);
      (Loss(net_->forward(x), x) / ranks_).backward();
    }
    optimizer.step();
    c10::NoGradGuard no_grad;
    for (at::Tensor& parameter : net_->parameters()) {
      parameter.mul_(Growth(step));
    }
  }

  // Computes with the values from before the step in what `request` holds.
  at::Tensor Output(const Request& request, const at::Tensor& x) {
    c10::NoGradGuard no_grad;
    const auto mixed = MakeNet(kDim, kBlocks);
    CopyInto(*mixed);
    const auto old = before_->named_parameters();
    for (auto& item : mixed->named_parameters()) {
      bool held = item.key().rfind("blocks.", 0) != 0 && request.holds_root;
      for (int block : request.held) {
        held |= item.key().rfind(absl::StrCat("blocks.", block, "."), 0) == 0;
      }
      if (held) item.value().copy_(old[item.key()]);
    }
    if (!is_bf16_) return mixed->forward(x);
    mixed->to(at::kBFloat16);
    return mixed->forward(x.to(at::kBFloat16));
  }

  // A factor that is applied after a step, so that the values before it differ
  // in bf16, too.
  static double Growth(int step) { return step % 2 == 0 ? 1.5 : 0.6; }

  static at::Tensor Data(int step, int rank) {
    return Rows(step * 100 + rank * 10, 4, kDim);
  }

 private:
  void CopyInto(NetImpl& target) {
    c10::NoGradGuard no_grad;
    const auto own = net_->named_parameters();
    for (auto& item : target.named_parameters()) {
      item.value().copy_(own[item.key()]);
    }
  }

  const int ranks_;
  const bool is_bf16_;
  const std::shared_ptr<NetImpl> net_;
  const std::shared_ptr<NetImpl> before_;
};

absl::Status Fail(const std::string& text) { return absl::InternalError(text); }

absl::StatusOr<Group> MakeGroup(const Way& way, int world_size) {
  return way.in_one_host ? CreateSharedMemoryGroup(world_size)
                         : comm::CreateLocalGroup(world_size);
}

Options OptionsFor(const Way& way) {
  Options options = BlockUnits();
  options.share_memory = way.shares;
  options.abort_on_failure = false;
  if (way.is_bf16) options.unit.precision.param_dtype = at::kBFloat16;
  return options;
}

class ToldFence final : public comm::Fence {
 public:
  ToldFence(std::unique_ptr<comm::Fence> base, std::function<void()> tell)
      : base_(std::move(base)), tell_(std::move(tell)) {}
  void Arrive() override {
    base_->Arrive();
    tell_();
  }
  absl::Status Wait(absl::Time deadline) override {
    return base_->Wait(deadline);
  }

 private:
  const std::unique_ptr<comm::Fence> base_;
  const std::function<void()> tell_;
};

// Calls `tell` when the rank reaches a fence of common memory.
class ToldFences final : public comm::ForwardingCommunicator {
 public:
  ToldFences(std::shared_ptr<Communicator> base, std::function<void()> tell)
      : ForwardingCommunicator(std::move(base)), tell_(std::move(tell)) {}

  absl::StatusOr<comm::CommonMemory> AllocateCommon(int64_t bytes) override {
    FSDP_ASSIGN_OR_RETURN(comm::CommonMemory common,
                          base().AllocateCommon(bytes));
    common.fence = std::make_unique<ToldFence>(std::move(common.fence), tell_);
    return common;
  }

 private:
  const std::function<void()> tell_;
};

absl::Status Nothing(Net&) { return absl::OkStatus(); }

torch::nn::Module& Block(Net& model, int i) {
  return *model.module()->blocks[i];
}

absl::Status ReshardAll(Net& model) {
  for (int i = 0; i < kBlocks; ++i) {
    FSDP_RETURN_IF_ERROR(Reshard(Block(model, i)));
  }
  return Reshard(*model.module());
}

absl::Status UnshardAndWait(torch::nn::Module& module) {
  FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(module));
  return handle.Wait();
}

std::vector<Request> Requests() {
  return {
      {"nothing", Nothing, Nothing, {}},
      {"one unit",
       [](Net& model) { return UnshardAndWait(Block(model, 0)); },
       [](Net& model) { return Reshard(Block(model, 0)); },
       {0}},
      {"one unit, not waited for",
       [](Net& model) { return Unshard(Block(model, 1)).status(); },
       [](Net& model) { return Reshard(Block(model, 1)); },
       {1}},
      {"a look",
       [](Net& model) -> absl::Status {
         FSDP_RETURN_IF_ERROR(UnshardAndWait(Block(model, 0)));
         return Reshard(Block(model, 0));
       },
       Nothing,
       {}},
      {"the root",
       [](Net& model) { return UnshardAndWait(*model.module()); },
       [](Net& model) { return Reshard(*model.module()); },
       {},
       true},
      {"everything",
       [](Net& model) { return model->RebuildFullParams().status(); },
       ReshardAll,
       {0, 1, 2},
       true},
      {"a forward that nobody goes back through, and the root that it keeps",
       [](Net& model) -> absl::Status {
         const at::AutoGradMode with_grad(true);
         model->forward(Rows(0, 2, kDim));
         return UnshardAndWait(*model.module());
       },
       [](Net& model) { return Reshard(*model.module()); },
       {},
       true},
      {"a forward with grad, a look at its root",
       [](Net& model) -> absl::Status {
         const at::AutoGradMode with_grad(true);
         model->forward(Rows(0, 2, kDim));
         FSDP_RETURN_IF_ERROR(UnshardAndWait(*model.module()));
         return Reshard(*model.module());
       },
       Nothing,
       {}},
      {"a forward that fails",
       [](Net& model) -> absl::Status {
         FSDP_RETURN_IF_ERROR(UnshardAndWait(Block(model, 2)));
         return TorchToStatus("f", [&] { model->forward(Rows(0, 2, 3)); }).ok()
                    ? Fail("a wrong shape is accepted")
                    : absl::OkStatus();
       },
       Nothing,
       {}},
      {"full parameters",
       [](Net& model) -> absl::Status {
         FSDP_RETURN_IF_ERROR(UnshardAndWait(Block(model, 0)));
         FSDP_ASSIGN_OR_RETURN(FullParamsScope scope,
                               model->SummonFullParams());
         return scope.Close();
       },
       Nothing,
       {}},
  };
}

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
  for (const Way& way : kWays) {
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

TEST(HeldUnitTest, AStepPassesTwoFences) {
  ASSERT_OK_AND_ASSIGN(const Group group, CreateSharedMemoryGroup(2));
  EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
    int fences = 0;
    FSDP_ASSIGN_OR_RETURN(
        Net model, FullyShard(MakeNet(kDim, kBlocks),
                              std::make_shared<ToldFences>(
                                  Unowned(world), [&fences] { ++fences; }),
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
      Net model, FullyShard(MakeNet(kDim, kBlocks),
                            std::make_shared<ToldFences>(Unowned(world), reach),
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
  for (const Way& way : kWays) {
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
  for (const Way& way : kWays) {
    ASSERT_OK_AND_ASSIGN(const Group group, MakeGroup(way, GetParam()));
    absl::Notification written;
    EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) {
      return WriteAfterAsking(way, world, written);
    }))) << way.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, RequestTest, ::testing::Values(2, 3));

}  // namespace
}  // namespace fsdp::testing
