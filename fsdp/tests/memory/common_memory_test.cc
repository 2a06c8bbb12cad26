// Sharding where the ranks of a host compute with one copy of the parameters.
#include <torch/optim/sgd.h>

#include "absl/synchronization/notification.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::RankFunction;

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;

using Net = FullyShardedDataParallel<NetImpl>;

absl::Status RunSharing(int world_size, const RankFunction& fn) {
  return AllOk(RunRanks(CreateSharedMemoryGroup(world_size).value(), fn));
}

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

// Calls `inside` at the end of its forward.
class GatedImpl : public torch::nn::Module {
 public:
  explicit GatedImpl(std::function<void()> inside)
      : net(register_module("net", MakeNet(kDim, kBlocks))),
        inside_(std::move(inside)) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = Forward(net, x);
    inside_();
    return y;
  }
  std::shared_ptr<NetImpl> net;

 private:
  const std::function<void()> inside_;
};

// Returns the status of rank 0's forward when rank 1 is late, before its own
// forward or inside it.
absl::Status ForwardWithALateRank(bool inside, bool with_grad) {
  absl::Notification rank0_is_out;
  const std::vector<absl::Status> results =
      RunRanks(CreateSharedMemoryGroup(2).value(), [&](Communicator& world) {
        const auto be_late = [&] {
          if (world.rank() == 1) rank0_is_out.WaitForNotification();
        };
        Options options = BlockUnits();
        options.timeout = absl::Milliseconds(200);
        const auto gated = std::make_shared<GatedImpl>([&] {
          if (inside) be_late();
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
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("every rank has written its shards")));
}

TEST(CommonMemoryTest, NoRankGoesOnToWriteBeforeAllHaveRead) {
  for (const bool with_grad : {false, true}) {
    EXPECT_THAT(ForwardWithALateRank(/*inside=*/true, with_grad),
                StatusIs(absl::StatusCode::kDeadlineExceeded,
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

// Counts the runtime's requests for memory.
class CountingCommunicator final : public comm::ForwardingCommunicator {
 public:
  CountingCommunicator(std::unique_ptr<Communicator> base, int* allocations)
      : ForwardingCommunicator(std::move(base)), allocations_(allocations) {}

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    ++*allocations_;
    return base().AllocateSymmetric(bytes);
  }
  absl::StatusOr<comm::CommonMemory> AllocateCommon(int64_t bytes) override {
    ++*allocations_;
    return base().AllocateCommon(bytes);
  }

 private:
  int* const allocations_;
};

TEST(CommonMemoryTest, NothingIsAllocatedAfterTheFirstStep) {
  for (const bool share : {false, true}) {
    EXPECT_OK(RunSharing(2, [&](Communicator& world) -> absl::Status {
      int allocations = 0;
      FSDP_ASSIGN_OR_RETURN(auto part, world.Split(0, 0));
      Options options = BlockUnits();
      options.share_memory = share;
      FSDP_ASSIGN_OR_RETURN(Net model,
                            FullyShard(MakeNet(kDim, kBlocks),
                                       std::make_shared<CountingCommunicator>(
                                           std::move(part), &allocations),
                                       options));
      torch::optim::SGD optimizer(model->Parameters(), 0.1);
      FSDP_RETURN_IF_ERROR(TrainOneStep(model, optimizer, world.rank()));
      const int after_first = std::exchange(allocations, 0);
      // The second step prefetches.
      FSDP_RETURN_IF_ERROR(TrainOneStep(model, optimizer, world.rank()));
      if (after_first == 0 || allocations > 1) {
        return absl::InternalError(absl::StrCat(after_first, allocations));
      }
      allocations = 0;
      for (int step = 0; step < 3; ++step) {
        FSDP_RETURN_IF_ERROR(TrainOneStep(model, optimizer, world.rank()));
      }
      return CheckThat(allocations, Eq(0),
                       "count of allocations after two steps");
    }));
  }
}

}  // namespace
}  // namespace fsdp::testing
