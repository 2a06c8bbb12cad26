// Sharding where the ranks of a host compute with one copy of the parameters,
// and units that users hold gathered while shards are written, there and
// elsewhere. KnownProgramTest steps and evaluates with such units.
#include <ATen/ops/full_like.h>
#include <torch/optim/sgd.h>

#include "absl/synchronization/notification.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

constexpr int kBlocks = 3;

using Net = FullyShardedDataParallel<NetImpl>;

absl::StatusOr<Net> ShardedNet(Communicator& world, const Options& options) {
  return FullyShard(MakeNet(kDim, kBlocks), Unowned(world), options);
}

Options Bf16() {
  Options options = BlockUnits();
  options.unit.precision.param_dtype = at::kBFloat16;
  return options;
}

absl::Status TrainOneStep(Net& model, torch::optim::Optimizer& optimizer,
                          int rank) {
  const at::Tensor input = Rows(int64_t{4} * rank, 4, kDim);
  model->zero_grad();
  FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(input), input)));
  optimizer.step();
  return absl::OkStatus();
}

TEST(CommonMemoryTest, NothingMovesToGather) {
  std::vector<CollectiveLog> logs(2);
  for (const bool is_bf16 : {false, true}) {
    for (CollectiveLog& log : logs) log.Clear();
    EXPECT_OK(RunSharing(2, [&](Communicator& world) -> absl::Status {
      CollectiveLog* log = &logs[world.rank()];
      // The group is split, because Split() takes all ranks' ends from the
      // caller.
      FSDP_ASSIGN_OR_RETURN(auto part, world.Split(0, 0));
      const std::shared_ptr<Communicator> recording =
          comm::Record(std::move(part), log);
      FSDP_ASSIGN_OR_RETURN(Net model,
                            FullyShard(MakeNet(kDim, kBlocks), recording,
                                       is_bf16 ? Bf16() : BlockUnits()));
      torch::optim::SGD optimizer(model->Parameters(), 0.1);
      log->Clear();
      for (int step = 0; step < 2; ++step) {
        FSDP_RETURN_IF_ERROR(TrainOneStep(model, optimizer, world.rank()));
      }
      const MemoryPlan plan = model->PlanMemory();
      EXPECT_TRUE(plan.gathered == 0 && (plan.copies > 0) == is_bf16)
          << plan.ToString();
      const PoolStats stats = model->memory_stats().parameters;
      return CheckThat(stats.reserved_bytes, Eq(0),
                       "bytes for gathered parameters");
    }));
    // One per unit and step shows that all ranks have cast their parts.
    EXPECT_EQ(logs[0].TotalsOf(Collective::kAllGather).count,
              is_bf16 ? 2 * (kBlocks + 1) : 0);
    EXPECT_EQ(logs[0].TotalsOf(Collective::kReduceScatter).count,
              2 * (kBlocks + 1));
  }
}

// Returns the status of rank 0's forward when rank 1 is late, before its own
// forward or inside it.
absl::Status ForwardWithALateRank(bool inside, bool with_grad) {
  absl::Notification rank0_is_out;
  const std::vector<absl::Status> results =
      RunRanks(CreateSharedMemoryGroup(2).value(), [&](Communicator& world) {
        const auto be_late = [&] {
          if (world.rank() == 1) rank0_is_out.WaitForNotification();
        };
        Options options = UnitsOf<torch::nn::LinearImpl>();
        options.timeout = absl::Milliseconds(200);
        const auto gated =
            std::make_shared<Mlp>([&](Mlp& net, const at::Tensor& x) {
              at::Tensor y = Forward(net.second, Forward(net.first, x));
              if (inside) be_late();
              return y;
            });
        auto model = FullyShard(gated, Unowned(world), options);
        if (!model.ok()) return model.status();
        if (!inside) be_late();
        at::AutoGradMode grad(with_grad);
        absl::Status status = TorchToStatus(
            "forward", [&] { (*model)->forward(Rows(0, 4, kDim)); });
        if (world.rank() == 0) rank0_is_out.Notify();
        return status;
      });
  return results[0];
}

TEST(CommonMemoryTest, NoRankReadsBeforeAllHaveWritten) {
  EXPECT_THAT(ForwardWithALateRank(/*inside=*/false, /*with_grad=*/true),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("every rank has written its shards")));
}

TEST(CommonMemoryTest, NoRankGoesOnToWriteBeforeAllHaveRead) {
  for (const bool with_grad : {false, true}) {
    EXPECT_THAT(ForwardWithALateRank(/*inside=*/true, with_grad),
                StatusIs(Code::kDeadlineExceeded,
                         HasSubstr("no rank reads other ranks' shards")));
  }
}

// Every rank writes as soon as its call returns and reads again at once, so
// that a missing fence changes values.
TEST(CommonMemoryTest, WritesBetweenForwardsAreSeenByAllAndByNobodyTooEarly) {
  constexpr int kRounds = 200;
  for (const bool is_bf16 : {false, true}) {
    EXPECT_OK(RunSharing(3, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Net model,
                            ShardedNet(world, is_bf16 ? Bf16() : BlockUnits()));
      const at::Tensor input = Rows(0, 4, kDim);
      for (int round = 0; round < kRounds; ++round) {
        {
          torch::NoGradGuard no_grad;
          for (const TensorRange& named : model->Ranges()) {
            named.values.fill_(round % 7 / 8.0);
          }
        }
        at::AutoGradMode grad(round % 2 == 0);
        const at::Tensor output = model->forward(input);
        const auto plain = MakeNet(kDim, kBlocks);
        torch::NoGradGuard no_grad;
        for (at::Tensor& parameter : plain->parameters()) {
          parameter.fill_(round % 7 / 8.0);
        }
        if (is_bf16) plain->to(at::kBFloat16);
        const at::Tensor expected =
            plain->forward(is_bf16 ? input.to(at::kBFloat16) : input);
        EXPECT_TRUE(at::equal(output, expected)) << "round " << round;
      }
      return absl::OkStatus();
    }));
  }
}

struct Requests {
  int allocations = 0;
  int fences = 0;  // of common memory that the rank has reached
};

class CountedFence final : public comm::Fence {
 public:
  CountedFence(std::unique_ptr<comm::Fence> base, Requests* requests)
      : base_(std::move(base)), requests_(requests) {}
  void Arrive() override {
    base_->Arrive();
    ++requests_->fences;
  }
  absl::Status Wait(absl::Time deadline) override {
    return base_->Wait(deadline);
  }

 private:
  const std::unique_ptr<comm::Fence> base_;
  Requests* const requests_;
};

// Counts the runtime's requests for memory, and its fences.
class CountingCommunicator final : public comm::ForwardingCommunicator {
 public:
  CountingCommunicator(std::shared_ptr<Communicator> base, Requests* requests)
      : ForwardingCommunicator(std::move(base)), requests_(requests) {}

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    ++requests_->allocations;
    return base().AllocateSymmetric(bytes);
  }
  absl::StatusOr<comm::CommonMemory> AllocateCommon(int64_t bytes) override {
    ++requests_->allocations;
    FSDP_ASSIGN_OR_RETURN(auto common, base().AllocateCommon(bytes));
    common.fence =
        std::make_unique<CountedFence>(std::move(common.fence), requests_);
    return common;
  }

 private:
  Requests* const requests_;
};

// Steps from the third on, since the second prefetches.
TEST(CommonMemoryTest, AStepAllocatesNothingAndPassesTwoFences) {
  for (const bool share : {false, true}) {
    EXPECT_OK(RunSharing(2, [&](Communicator& world) -> absl::Status {
      Requests requests;
      FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> part,
                            world.Split(0, 0));
      Options options = BlockUnits();
      options.share_memory = share;
      FSDP_ASSIGN_OR_RETURN(
          Net model,
          FullyShard(MakeNet(kDim, kBlocks),
                     std::make_shared<CountingCommunicator>(part, &requests),
                     options));
      torch::optim::SGD optimizer(model->Parameters(), 0.1);
      for (int step = 0; step < 5; ++step) {
        const int since_begin = std::exchange(requests, {}).allocations;
        FSDP_RETURN_IF_ERROR(TrainOneStep(model, optimizer, world.rank()));
        if (step == 0) {
          EXPECT_GT(since_begin + requests.allocations, 0);
        } else {
          EXPECT_LE(requests.allocations, step == 1 ? 1 : 0) << step;
        }
        EXPECT_EQ(requests.fences, share ? 2 : 0) << step;
      }
      return absl::OkStatus();
    }));
  }
}

// --- Units that users hold ---------------------------------------------------

constexpr double kRate = 0.5;
constexpr absl::Duration kPatience = absl::Seconds(30);

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

Options OptionsFor(const Way& way) {
  Options options = GoOn(way.is_bf16 ? Bf16() : BlockUnits());
  options.share_memory = way.shares;
  return options;
}

torch::nn::Module& Block(Net& model, int i) {
  return *model.module()->blocks[i];
}

absl::Status UnshardAndWait(torch::nn::Module& module) {
  FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(module));
  return handle.Wait();
}

// Steps, and scales the parameters so that they differ in bf16, too.
void Write(Net& model) {
  torch::optim::SGD(model->Parameters(), kRate).step();
  c10::NoGradGuard no_grad;
  for (const TensorRange& named : model->Ranges()) named.values.mul_(1.5);
}

// Backward, or a region's recomputation, would gather new values where forward
// had the old ones.
absl::Status TrainOnOldValues(const Way& way, bool root, bool in_region,
                              Communicator& world) {
  FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                              Unowned(world), OptionsFor(way)));
  FSDP_ASSIGN_OR_RETURN(Net fresh, FullyShard(MakeNet(kDim, kBlocks),
                                              Unowned(world), OptionsFor(way)));
  torch::nn::Module& unit = root ? *model.module() : Block(model, 1);
  const at::Tensor x = Rows(10 * world.rank(), 4, kDim);
  for (Net* each : {&model, &fresh}) {
    FSDP_RETURN_IF_ERROR((*each)->Backward(Loss((*each)->forward(x), x)));
  }
  FSDP_RETURN_IF_ERROR(UnshardAndWait(unit));
  Write(model);
  const auto forward = [&](const at::Tensor& input) {
    return model->forward(input);
  };
  const absl::Status refused = TorchToStatus(
      "forward", [&] { in_region ? Checkpoint(forward, x) : forward(x); });
  FSDP_RETURN_IF_ERROR(
      CheckThat(refused,
                StatusIs(Code::kFailedPrecondition,
                         AllOf(HasSubstr(root ? "unit root" : "blocks.1"),
                               HasSubstr("Reshard() it after writing"))),
                "refusal"));
  FSDP_RETURN_IF_ERROR(Reshard(unit));
  // A request after the step has no effect on the values.
  FSDP_RETURN_IF_ERROR(UnshardAndWait(unit));
  model->zero_grad();
  const at::Tensor loss = Loss(model->forward(x), x);
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  Write(fresh);
  return CheckTensor(loss, Loss(fresh->forward(x), x), "loss");
}

TEST(HeldUnitTest, TrainingOnValuesOfBeforeAStepIsRefusedByEveryBackend) {
  for (const Way& way : kWays) {
    for (const int kind : {0, 1, 2, 3}) {
      ASSERT_OK_AND_ASSIGN(const auto group, MakeGroup(2, way.in_one_host));
      EXPECT_OK(AllOk(RunRanks(group,
                               [&](Communicator& world) {
                                 return TrainOnOldValues(way, kind % 2 == 1,
                                                         kind >= 2, world);
                               })))
          << way.name << " " << kind;
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
  FSDP_RETURN_IF_ERROR(Check(
      world.rank() == 0 || written.WaitForNotificationWithTimeout(kPatience),
      "rank 0 waits for the others"));
  FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(block));
  write(2);
  if (world.rank() == 0) written.Notify();
  FSDP_RETURN_IF_ERROR(handle.Wait());
  write(3);
  const at::Tensor weight = block.as<BlockImpl>()->fc->weight;
  FSDP_RETURN_IF_ERROR(CheckTensor(weight, at::full_like(weight, 1), "weight"));
  return Reshard(block);
}

TEST(HeldUnitTest, HasTheValuesOfTheTimeOfUnshard) {
  for (const Way& way : kWays) {
    for (const int world_size : {2, 3}) {
      ASSERT_OK_AND_ASSIGN(const auto group,
                           MakeGroup(world_size, way.in_one_host));
      absl::Notification written;
      EXPECT_OK(AllOk(RunRanks(group,
                               [&](Communicator& world) {
                                 return WriteAfterAsking(way, world, written);
                               })))
          << way.name << " " << world_size;
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
