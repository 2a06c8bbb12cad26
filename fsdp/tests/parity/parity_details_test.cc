// Behaviours of docs/parity.md, checked element by element, that other tests
// show only in passing. Ranks have different data.
#include <ATen/ops/full.h>
#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/state/whole_model.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_toy.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing::toy {
namespace {

using ::fsdp::comm::testing::RunRefusedRanks;

at::Tensor DataOf(int rank) { return Rows(int64_t{3} * rank, 3, kDim); }

// Ranks that share memory write private copies.
TEST(ScopeTest, OfWhatEachRankWritesExactlyItsRangeIsKept) {
  const auto write = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
      c10::NoGradGuard no_grad;
      for (at::Tensor& p : model.module()->parameters()) p.fill_(world.rank());
      FSDP_RETURN_IF_ERROR(full.Close());
    }
    // Checks the ranks' ranges, which cover all elements.
    for (const TensorRange& named : model->Ranges()) {
      EXPECT_TRUE((named.values == world.rank()).all().item<bool>())
          << named.name;
    }
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          for (const TensorRange& named : model->Ranges()) {
            if (named.name != name) continue;
            const at::Tensor own = OwnPart(named, value);
            return Check((own == world.rank()).all().item<bool>(), name);
          }
          return absl::InternalError(absl::StrCat("no shard of ", name));
        });
  };
  for (const int world_size : {1, 2, 3, 5}) {
    EXPECT_OK(RunAllRanks(world_size, write)) << world_size << " ranks";
    EXPECT_OK(RunSharing(world_size, write)) << world_size << " ranks";
  }
}

TEST(ScopeTest, WhatCannotBeEnteredLeavesWhatHasBeenEntered) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model first, MakeModel(world));
    FSDP_ASSIGN_OR_RETURN(Model second, MakeModel(world));
    torch::nn::ModuleList both(first.ptr(), second.ptr());
    absl::Status refused;
    {
      FSDP_ASSIGN_OR_RETURN(FullParamsScope inner, second->SummonFullParams());
      refused = SummonFullParams(*both).status();
      FSDP_RETURN_IF_ERROR(Backward(first));
    }
    FSDP_RETURN_IF_ERROR(Backward(second));
    FSDP_RETURN_IF_ERROR(SummonFullParams(*both).status());
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run),
              AllRefuse("whole for SummonFullParams()"));
}

// Holds a graph from before the scope, and a unit that the user has unsharded.
absl::Status SummonBetweenForwardAndBackward(Communicator& world,
                                             const Options& options) {
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
  const auto plain = MakeNet(kDim, kBlocks);
  const at::Tensor x = DataOf(world.rank());
  const at::Tensor loss = Loss(model->forward(x), x);
  FSDP_ASSIGN_OR_RETURN(auto handle, Unshard(*model.module()->blocks[0]));
  FSDP_RETURN_IF_ERROR(handle.Wait());
  {
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
    EXPECT_EQ(model->memory_stats().parameters.in_use_bytes, 0);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(at::equal(model.module()->named_parameters()[item.key()],
                            item.value()))
          << item.key();
    }
    FSDP_RETURN_IF_ERROR(full.Close());
  }
  FSDP_RETURN_IF_ERROR(CheckAllFreed(*model.module()));
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  for (int rank = 0; rank < world.world_size(); ++rank) {
    Loss(plain->forward(DataOf(rank)), DataOf(rank)).backward();
  }
  return CheckMeans(*model, *plain, world.world_size());
}

TEST(ScopeTest, WhatWasGatheredBeforeIsFreedAndAGraphOfBeforeGathersItAgain) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
        ShardingStrategy::kShardOptimizer, ShardingStrategy::kNoShard}) {
    Options options = BlockUnits();
    options.unit.strategy = strategy;
    EXPECT_OK(RunAllRanks(3,
                          [&](Communicator& world) {
                            return SummonBetweenForwardAndBackward(world,
                                                                   options);
                          }))
        << "strategy " << static_cast<int>(strategy);
  }
}

// A weight of two sibling units belongs to their parent; the biases are their
// own.
class TiedSiblings : public torch::nn::Module {
 public:
  struct Scaling : torch::nn::Module {
    explicit Scaling(const at::Tensor& shared)
        : weight(register_parameter("weight", shared)),
          bias(register_parameter("bias", at::full({kDim}, 0.25))) {}
    at::Tensor forward(const at::Tensor& x) {
      if (look) look();
      return (x * weight + bias).tanh();
    }
    at::Tensor weight;
    at::Tensor bias;
    std::function<void()> look;
  };

  at::Tensor forward(const at::Tensor& x) {
    return Forward(right, Forward(left, x));
  }

  std::shared_ptr<Scaling> left =
      register_module("left", std::make_shared<Scaling>(at::full({kDim}, 1.5)));
  std::shared_ptr<Scaling> right =
      register_module("right", std::make_shared<Scaling>(left->weight));
};

TEST(TiedTest, WhetherItIsGatheredIsOneAnswerForAllNames) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = UnitsOf<TiedSiblings::Scaling>();
    options.prefetch.forward = false;
    FSDP_ASSIGN_OR_RETURN(
        auto model,
        FullyShard(std::make_shared<TiedSiblings>(), Unowned(world), options));
    TiedSiblings& net = *model.module();
    // Returns which are freed of both weights, left's bias and right's bias.
    const auto seen = [&net] {
      std::string freed;
      for (const at::Tensor& p : {net.left->weight, net.right->weight,
                                  net.left->bias, net.right->bias}) {
        freed += IsFreed(p) ? 'f' : '-';
      }
      return freed;
    };
    std::string in_left;
    std::string in_right;
    net.left->look = [&] { in_left = seen(); };
    net.right->look = [&] { in_right = seen(); };
    const at::Tensor x = DataOf(world.rank());
    const at::Tensor loss = model->forward(x).square().mean();
    EXPECT_EQ(in_left, "---f");
    EXPECT_EQ(in_right, "--f-");
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    EXPECT_EQ(seen(), "ffff");
    FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(*net.right));
    FSDP_RETURN_IF_ERROR(handle.Wait());
    EXPECT_EQ(seen(), "fff-");
    FSDP_ASSIGN_OR_RETURN(UnshardHandle root, Unshard(net));
    FSDP_RETURN_IF_ERROR(root.Wait());
    FSDP_RETURN_IF_ERROR(Reshard(*net.right));
    return Check(seen() == "--ff", "of the root: " + seen());
  }));
}

TEST(RebuildTest, GivesTheShardItselfWhatWasGatheredOrACopyToComputeWith) {
  for (const int world_size : {1, 2}) {
    for (const bool casts : {false, true}) {
      EXPECT_OK(RunAllRanks(
          world_size,
          [&](Communicator& world) -> absl::Status {
            Options options;
            if (casts) options.unit.precision = ComputeIn(at::kBFloat16);
            FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
            FSDP_ASSIGN_OR_RETURN(const auto rebuilt,
                                  model->RebuildFullParams());
            FSDP_RETURN_IF_ERROR(Check(rebuilt.size() == 1, "units"));
            const bool is_shard = rebuilt[0].flat.data_ptr() ==
                                  model->Ranges().front().values.data_ptr();
            EXPECT_EQ(is_shard, world_size == 1 && !casts);
            EXPECT_EQ(rebuilt[0].safe_to_free, !is_shard);
            return Check(rebuilt[0].flat.scalar_type() ==
                             (casts ? at::kBFloat16 : at::kFloat),
                         "dtype");
          }))
          << world_size << " ranks" << (casts ? " in bf16" : "");
    }
  }
}

// On one rank, one element is as large as its shard. Tied, it is gathered once
// for both uses.
class OneElement : public torch::nn::Module {
 public:
  OneElement() : scale(register_parameter("scale", at::full({1}, 0.5))) {
    tied = register_module("tied", std::make_shared<Inner>(scale));
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(tied, x * scale) + scale;
  }

  struct Inner : torch::nn::Module {
    explicit Inner(const at::Tensor& scale)
        : same(register_parameter("same", scale)) {}
    at::Tensor forward(const at::Tensor& x) { return (x * same).tanh(); }
    at::Tensor same;
  };

  at::Tensor scale;
  std::shared_ptr<Inner> tied;
};

TEST(OneElementTest, OfShape1TiedOverTwoModulesTrainsAsInOneProcess) {
  TrainingTask task;
  task.loss = [](const TensorFunction& forward, int64_t part) {
    return forward(DataOf(static_cast<int>(part))).square().mean();
  };
  for (const int world_size : {1, 2, 3}) {
    EXPECT_OK(
        RunAllRanks(world_size,
                    [&](Communicator& world) -> absl::Status {
                      FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
                      return CheckTask<OneElement>(
                          task, [] { return std::make_shared<OneElement>(); },
                          mesh, UnitsOf<OneElement::Inner>());
                    }))
        << world_size << " ranks";
  }
}

}  // namespace
}  // namespace fsdp::testing::toy
