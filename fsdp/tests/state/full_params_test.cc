#include "fsdp/state/full_params.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/mesh.h"
#include "comm/testing/run_ranks.h"
#include "comm/testing/run_refused_ranks.h"
#include "comm/wrappers/recording_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/mixed_precision.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::AllOk;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::comm::testing::RunRefusedRanks;
using ::fsdp::testing::BlockImpl;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;

using Model = FullyShardedDataParallel<NetImpl>;

absl::StatusOr<Model> MakeModel(Communicator& world,
                                const Options& options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, kBlocks), Unowned(world), options);
}

absl::Status Check(bool condition, const std::string& what) {
  return condition ? absl::OkStatus() : absl::InternalError(what);
}

absl::Status Backward(Model& model) {
  const at::Tensor x = Rows(model->communicator().rank(), 3, kDim);
  return model->Backward(Loss(model->forward(x).to(at::kFloat), x));
}

// Whether all parameters of `net` have the values they were made with.
absl::Status CheckInitialValues(const torch::nn::Module& net) {
  const auto expected = MakeNet(kDim, kBlocks);
  for (const auto& item : expected->named_parameters()) {
    const at::Tensor* actual = net.named_parameters().find(item.key());
    FSDP_RETURN_IF_ERROR(Check(actual != nullptr, item.key()));
    FSDP_RETURN_IF_ERROR(
        Check(at::equal(*actual, item.value()), "values of " + item.key()));
  }
  return absl::OkStatus();
}

bool IsFreed(const at::Tensor& parameter) {
  try {
    (void)parameter.sum();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

absl::Status CheckAllFreed(const torch::nn::Module& net) {
  for (const auto& item : net.named_parameters()) {
    FSDP_RETURN_IF_ERROR(Check(IsFreed(item.value()), item.key() + " is left"));
  }
  return absl::OkStatus();
}

// --- What is seen inside -----------------------------------------------------

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
    // No low-precision copy from before is used.
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

// Several sharded models in a module that is none.
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

// --- Writing -----------------------------------------------------------------

struct WriteCase {
  const char* name;
  bool writeback;
  bool rank0_only;
  ShardingStrategy strategy;
  bool persists;
  bool offload_to_cpu = false;
};

class WritebackTest : public ::testing::TestWithParam<WriteCase> {};

// Rank r adds r + 1 to everything.
TEST_P(WritebackTest, KeepsWhatItPromises) {
  const WriteCase& c = GetParam();
  EXPECT_OK(RunAllRanks(4, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        comm::Mesh mesh,
        comm::Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", 2}}));
    Options options = BlockUnits();
    options.unit.strategy = c.strategy;
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(MakeNet(kDim, kBlocks), mesh, options));
    SummonOptions summon;
    summon.writeback = c.writeback;
    summon.rank0_only = c.rank0_only;
    summon.offload_to_cpu = c.offload_to_cpu;
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                            model->SummonFullParams(summon));
      const bool has_values = !c.rank0_only || world.rank() == 0;
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) {
        FSDP_RETURN_IF_ERROR(Check(IsFreed(p) != has_values, "values"));
        if (has_values) p.add_(world.rank() + 1);
      }
      FSDP_RETURN_IF_ERROR(full.Close());
    }
    const auto expected = MakeNet(kDim, kBlocks);
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) -> absl::Status {
          const at::Tensor added =
              value - *expected->named_parameters().find(name);
          if (!c.persists)
            return Check(added.abs().max().item<float>() < 1e-6,
                         name + " was written");
          if (c.rank0_only) {
            return Check(at::allclose(added, at::ones_like(added), 1e-4, 1e-5),
                         name + " is not rank 0's");
          }
          // Every element is what one rank of the group has written.
          FSDP_RETURN_IF_ERROR(
              Check(added.min().item<float>() > 0.99, name + " was lost"));
          return absl::OkStatus();
        });
  }));
}

INSTANTIATE_TEST_SUITE_P(
    All, WritebackTest,
    ::testing::Values(
        WriteCase{"OwnRange", true, false, ShardingStrategy::kFullShard, true},
        WriteCase{"Volatile", false, false, ShardingStrategy::kFullShard,
                  false},
        WriteCase{"OfRank0", true, true, ShardingStrategy::kFullShard, true},
        WriteCase{"VolatileOfRank0", false, true, ShardingStrategy::kFullShard,
                  false},
        WriteCase{"Hybrid", true, false, ShardingStrategy::kHybridShard, true},
        WriteCase{"HybridOfRank0", true, true, ShardingStrategy::kHybridShard,
                  true},
        WriteCase{"NotSharded", true, false, ShardingStrategy::kNoShard, true},
        WriteCase{"NotShardedOffloaded", true, false,
                  ShardingStrategy::kNoShard, true, true},
        // What is not sharded is written in place.
        WriteCase{"VolatileNotSharded", false, false,
                  ShardingStrategy::kNoShard, true}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(SummonFullParamsTest, EditsToOtherRanksRangesAreLost) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, Options()));
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) {
        p.fill_(world.rank());
      }
    }
    int ranges[2] = {0, 0};
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [&](const std::string&, const at::Tensor& value) {
          for (const int rank : {0, 1}) {
            ranges[rank] += (value == rank).any().item<bool>();
          }
          return absl::OkStatus();
        }));
    return Check(ranges[0] > 0 && ranges[1] > 0, "not each its own");
  }));
}

TEST(SummonFullParamsTest, ReplicasStayEqualWhateverEachWrites) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.strategy = ShardingStrategy::kNoShard;
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) {
        p.fill_(world.rank() + 1);
      }
    }
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          return Check((value == 1).all().item<bool>(), name);
        });
  }));
}

TEST(SummonFullParamsTest, AnExceptionInTheScopeStillWritesBackAndFrees) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    try {
      FullParamsScope full = ValueOrThrow(model->SummonFullParams());
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) p.fill_(3);
      throw std::runtime_error("in the scope");
    } catch (const std::runtime_error&) {
    }
    FSDP_RETURN_IF_ERROR(CheckAllFreed(*model.module()));
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          return Check((value == 3).all().item<bool>(), name);
        }));
    return Backward(model);
  }));
}

TEST(SummonFullParamsTest, TheNextStepUsesWhatWasWritten) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(Backward(model));
    const auto plain = MakeNet(kDim, kBlocks);
    c10::NoGradGuard no_grad;
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      for (at::Tensor& p : model.module()->parameters()) p.mul_(0.5);
      for (at::Tensor& p : plain->parameters()) p.mul_(0.5);
    }
    const at::Tensor x = Rows(0, 2, kDim);
    return Check(at::equal(model->forward(x), plain->forward(x)), "stale");
  }));
}

// --- Gradients, host memory --------------------------------------------------

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
  for (const NamedShard& named : model->NamedShards()) {
    FSDP_RETURN_IF_ERROR(
        Check((named.shard.grad() == 2).all().item<bool>(),
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

// --- Refusals ----------------------------------------------------------------

class SummonsInForward : public torch::nn::Module {
 public:
  SummonsInForward()
      : linear(register_module("linear", torch::nn::Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    refused = SummonFullParams(*linear).status();
    if (refused.ok()) refused = SummonFullParams(*this).status();
    return linear->forward(x);
  }
  torch::nn::Linear linear;
  absl::Status refused;
};

TEST(SummonFullParamsTest, IsRefusedInsideAForwardWhichGoesOn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<SummonsInForward>();
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    const at::Tensor y = model->forward(Rows(0, 2, kDim));
    FSDP_RETURN_IF_ERROR(
        Check(absl::IsFailedPrecondition(net->refused) &&
                  absl::StrContains(net->refused.message(), "inside a forward"),
              net->refused.ToString()));
    return model->Backward(y.sum());
  }));
}

TEST(SummonFullParamsTest, IsRefusedInsideABackwardWhichGoesOn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    at::Tensor x = Rows(0, 2, kDim);
    at::Tensor y = model->forward(x);
    absl::Status refused;
    y.register_hook([&](const at::Tensor& gradient) {
      refused = model->SummonFullParams().status();
      return gradient;
    });
    FSDP_RETURN_IF_ERROR(model->Backward(y.sum()));
    FSDP_RETURN_IF_ERROR(
        Check(absl::IsFailedPrecondition(refused), refused.ToString()));
    return Backward(model);
  }));
}

TEST(SummonFullParamsTest, InsideItEverythingElseIsRefusedByAllRanks) {
  using Misuse = std::function<absl::Status(Model&)>;
  const std::vector<Misuse> misuses = {
      [](Model& model) { return model->SummonFullParams().status(); },
      [](Model& model) {
        return SummonFullParams(*model.module()->blocks[0]).status();
      },
      [](Model& model) {
        return model->ForEachFullParameter(
            [](const std::string&, const at::Tensor&) {
              return absl::OkStatus();
            });
      },
      [](Model& model) {
        return TorchToStatus("forward",
                             [&] { model->forward(Rows(0, 2, kDim)); });
      },
      [](Model& model) { return Unshard(*model.module()).status(); },
      [](Model& model) { return model->RebuildFullParams().status(); },
      [](Model& model) { return model->SetGradientDivideFactors(2, 1); },
  };
  for (size_t i = 0; i < misuses.size(); ++i) {
    const auto run = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      absl::Status refused;
      {
        FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
        refused = misuses[i](model);
        FSDP_RETURN_IF_ERROR(CheckInitialValues(*model.module()));
      }
      FSDP_RETURN_IF_ERROR(Backward(model));
      return refused;
    };
    EXPECT_THAT(RunRefusedRanks(2, run),
                Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                              HasSubstr("whole for SummonFullParams()"))))
        << "misuse " << i;
  }
}

TEST(SummonFullParamsTest, ABackwardOfAnEarlierGraphIsRefusedInsideIt) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    const at::Tensor loss = model->forward(Rows(0, 2, kDim)).sum();
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
    return Check(absl::IsFailedPrecondition(model->Backward(loss)), "allowed");
  }));
}

TEST(SummonFullParamsTest, OptionsThatDifferBetweenRanksAreRefusedByAll) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    SummonOptions options;
    options.writeback = world.rank() == 0;
    const absl::Status refused = model->SummonFullParams(options).status();
    FSDP_RETURN_IF_ERROR(Backward(model));
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("the options of SummonFullParams()"))));
}

// Whole access that this rank alone has taken.
class WholeInUse {
 public:
  explicit WholeInUse(ShardedModel& model) : model_(model) {
    ThrowIfError(model_.BeginWholeAccess("a test"));
  }
  WholeInUse(const WholeInUse&) = delete;
  WholeInUse& operator=(const WholeInUse&) = delete;
  ~WholeInUse() { model_.EndWholeAccess(); }

 private:
  ShardedModel& model_;
};

// --- One unit at a time ------------------------------------------------------

TEST(ForEachFullParameterTest, EditsAreKeptWithWritebackOnly) {
  for (const bool writeback : {false, true}) {
    for (const bool rank0_only : {false, true}) {
      EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
        int visited = 0;
        FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
            [&](const std::string&, const at::Tensor& value) {
              ++visited;
              at::Tensor writable = value;
              writable.fill_(4);
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

TEST(ForEachFullParameterTest, AVisitorThatFailsOnOneRankFailsOnAll) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    const absl::Status failed = model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor&) {
          return Check(world.rank() != 1 || name != "head.bias", "my disk");
        },
        VisitOptions{/*writeback=*/true});
    FSDP_RETURN_IF_ERROR(Backward(model));
    return failed;
  };
  EXPECT_THAT(
      RunRefusedRanks(3, run),
      Each(StatusIs(absl::StatusCode::kInternal, HasSubstr("my disk"))));
}

// --- Ahead of use ------------------------------------------------------------

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

TEST(ForEachFullParameterTest, OptionsThatDifferBetweenRanksAreRefusedByAll) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    VisitOptions options;
    options.rank0_only = world.rank() == 0;
    const absl::Status refused = model->ForEachFullParameter(
        [](auto&, auto&) { return absl::OkStatus(); }, options);
    FSDP_RETURN_IF_ERROR(Backward(model));
    return refused;
  };
  EXPECT_THAT(
      RunRefusedRanks(3, run),
      Each(StatusIs(absl::StatusCode::kInvalidArgument,
                    HasSubstr("the options of ForEachFullParameter()"))));
}

// One rank is already inside: the others are told, and are not left inside.
TEST(SummonFullParamsTest, WhatOneRankCannotEnterAllLeave) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    absl::Status refused;
    {
      std::optional<WholeInUse> in_use;
      if (world.rank() == 1) in_use.emplace(model->sharded_model());
      refused = model->SummonFullParams().status();
    }
    FSDP_RETURN_IF_ERROR(Backward(model));
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run),
              Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                            HasSubstr("a test"))));
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
