// Compares backwards that reduce gradients of some units only, or only within
// the group of shards, with plain LibTorch.
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 10;
constexpr int kRanks = 4;
constexpr int kUnits = 4;  // with the root

class LayerImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x).tanh(); }
  Linear linear = register_module("linear", Linear(kDim, kDim));
};

// A net whose last layer may be left out.
class Net : public torch::nn::Module {
 public:
  Net() : head(register_module("head", Linear(kDim, 3))) {
    for (int i = 0; i < kUnits - 1; ++i) {
      layers.push_back(register_module(absl::StrCat("layer", i),
                                       std::make_shared<LayerImpl>()));
    }
    FillParameters(*this, 1);
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) {
      if (i + 1 < layers.size() || !skips_last) x = Forward(layers[i], x);
    }
    return head->forward(x);
  }
  std::vector<std::shared_ptr<LayerImpl>> layers;
  Linear head;
  bool skips_last = false;
};

// One backward of a training.
struct Turn {
  // One flag for each unit; the first is the root's.
  std::vector<bool> synchronizes = std::vector<bool>(kUnits, true);
  std::vector<bool> all_reduces = std::vector<bool>(kUnits, true);
  bool no_sync = false;
  bool skips_last = false;
  bool zeroes = false;  // before it
  // Whether layer 0's weight is trained.
  bool trains_weight = true;
};

template <typename Model>
at::Tensor LossOf(Model& model, int rank, int turn) {
  return model.forward(Rows(100 * turn + 7 * rank, 3, kDim)).square().mean();
}

class Plain {
 public:
  Plain() {
    for (int i = 0; i < kRanks; ++i) nets_.push_back(std::make_shared<Net>());
  }
  void Run(const Turn& turn, int number) {
    for (int rank = 0; rank < kRanks; ++rank) {
      Net& net = *nets_[rank];
      if (turn.zeroes) net.zero_grad();
      net.skips_last = turn.skips_last;
      net.layers[0]->linear->weight.set_requires_grad(turn.trains_weight);
      LossOf(net, rank, number).backward();
    }
  }
  Gradients Means() const { return MeansOf(nets_); }

 private:
  std::vector<std::shared_ptr<Net>> nets_;
};

absl::Status RunTurn(FullyShardedDataParallel<Net>& model, const Turn& turn,
                     int number) {
  if (turn.zeroes) model->zero_grad();
  Net& net = *model->module();
  net.skips_last = turn.skips_last;
  net.layers[0]->linear->weight.set_requires_grad(turn.trains_weight);
  for (int i = 0; i < kUnits; ++i) {
    torch::nn::Module& module =
        i == 0 ? static_cast<torch::nn::Module&>(net) : *net.layers[i - 1];
    FSDP_RETURN_IF_ERROR(SetRequiresGradientSync(module, turn.synchronizes[i],
                                                 /*recurse=*/false));
    FSDP_RETURN_IF_ERROR(
        SetRequiresAllReduce(module, turn.all_reduces[i], /*recurse=*/false));
  }
  std::optional<NoSyncScope> no_sync;
  if (turn.no_sync) no_sync.emplace(model->NoSync());
  return model->Backward(LossOf(*model, model->communicator().rank(), number));
}

std::vector<bool> AllBut(const std::vector<int>& others) {
  std::vector<bool> result(kUnits, true);
  for (int i : others) result[i] = false;
  return result;
}
std::vector<bool> None() { return std::vector<bool>(kUnits, false); }

absl::StatusOr<FullyShardedDataParallel<Net>> MakeModel(
    ShardingStrategy strategy, std::shared_ptr<Communicator> world) {
  Options options = UnitsOf<LayerImpl>();
  options.unit.strategy = strategy;
  FSDP_ASSIGN_OR_RETURN(
      const Mesh mesh,
      Mesh::Create(std::move(world), {{"replicate", 2}, {"shard", 2}}));
  return FullyShard(std::make_shared<Net>(), mesh, options);
}

class GradientSyncTest : public ::testing::TestWithParam<ShardingStrategy> {
 protected:
  // Compares the gradients after the last turn, which leaves nothing for later.
  static void ExpectAsPlain(const std::vector<Turn>& turns) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(auto model, MakeModel(GetParam(), Unowned(world)));
      Plain plain;
      for (size_t i = 0; i < turns.size(); ++i) {
        plain.Run(turns[i], static_cast<int>(i));
        FSDP_RETURN_IF_ERROR(RunTurn(model, turns[i], static_cast<int>(i)));
      }
      EXPECT_LE(model->memory_stats().gradients.in_use_bytes, 0);
      return CheckOwnGradients(*model, plain.Means(), 1e-5, 1e-7);
    }));
  }
};

TEST_P(GradientSyncTest, UnitsThatDoNotReduceKeepTheirGradientsForLater) {
  Turn some;
  some.synchronizes = AllBut({1, 3});
  ExpectAsPlain({some, some, Turn()});
  Turn root;
  root.synchronizes = AllBut({0});
  ExpectAsPlain({root, Turn(), root, Turn()});
}

TEST_P(GradientSyncTest, AllReducesMayWaitForTheLastBackward) {
  Turn shards;
  shards.all_reduces = None();
  ExpectAsPlain({shards, shards, Turn()});
  Turn some;
  some.all_reduces = AllBut({0, 2});
  ExpectAsPlain({Turn(), some, some, Turn()});
}

TEST_P(GradientSyncTest, AllKindsMixed) {
  Turn whole;
  whole.no_sync = true;
  Turn units;
  units.synchronizes = AllBut({2});
  Turn shards;
  shards.all_reduces = AllBut({1});
  Turn both;
  both.synchronizes = AllBut({3});
  both.all_reduces = None();
  ExpectAsPlain({both, whole, shards, units, both, Turn()});
}

TEST_P(GradientSyncTest, ZeroGradDropsWhatIsKept) {
  Turn both;
  both.synchronizes = AllBut({1});
  both.all_reduces = None();
  Turn last;
  last.zeroes = true;
  ExpectAsPlain({both, both, last});
}

// Such a unit's sums or whole gradients come from earlier backwards alone.
TEST_P(GradientSyncTest, AUnitThatTheLastBackwardDoesNotReachIsReduced) {
  Turn shards;
  shards.all_reduces = None();
  Turn units;
  units.synchronizes = AllBut({3});
  Turn last;
  last.skips_last = true;
  ExpectAsPlain({shards, shards, last});
  ExpectAsPlain({units, units, last});
  ExpectAsPlain({units, shards, last});
}

TEST_P(GradientSyncTest, WhatIsTrainedChangesMeanwhile) {
  Turn shards;
  shards.all_reduces = None();
  Turn frozen = shards;
  frozen.trains_weight = false;
  ExpectAsPlain({shards, frozen, shards, Turn()});
  ExpectAsPlain({frozen, shards, Turn()});
}

INSTANTIATE_TEST_SUITE_P(Strategies, GradientSyncTest,
                         ::testing::ValuesIn(kStrategies));

// Checks what is sent, and what is held meanwhile.
TEST(GradientSyncPlanTest, AllReducesWaitAndSegmentsAreKept) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    CollectiveLog log;
    FSDP_ASSIGN_OR_RETURN(auto own, world.Split(0, world.rank()));
    FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<Net> model,
                          MakeModel(ShardingStrategy::kHybridShard,
                                    comm::Record(std::move(own), &log)));
    const auto count = [&](Collective kind) {
      return log.TotalsOf(kind).count;
    };
    Turn shards;
    shards.all_reduces = None();
    FSDP_RETURN_IF_ERROR(SetRequiresAllReduce(*model->module(), false));
    MemoryPlanOptions options;
    options.backwards_per_step = 3;
    const MemoryPlan plan = model->PlanMemory(options);
    for (int step = 0; step < 2; ++step) {
      for (int i = 0; i < 3; ++i) {
        log.Clear();
        FSDP_RETURN_IF_ERROR(RunTurn(model, i < 2 ? shards : Turn(), i));
        // The last backward also compares orders.
        EXPECT_EQ(count(Collective::kReduceScatter), kUnits) << step << i;
        EXPECT_EQ(count(Collective::kAllReduce), i < 2 ? 1 : kUnits + 1)
            << step << i;
      }
    }
    return CheckThat(model->memory_stats().gradients.peak_in_use_bytes,
                     Eq(plan.in_flight), "bytes at most");
  }));
}

TEST(GradientSyncPlanTest, UnitsThatWaitAreHeldWhole) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        FullyShardedDataParallel<Net> model,
        MakeModel(ShardingStrategy::kFullShard, Unowned(world)));
    Turn some;
    some.synchronizes = AllBut({1, 2});
    FSDP_RETURN_IF_ERROR(RunTurn(model, some, 0));
    MemoryPlanOptions options;
    options.backwards_per_step = 2;
    const MemoryPlan plan = model->PlanMemory(options);
    FSDP_RETURN_IF_ERROR(RunTurn(model, Turn(), 1));
    return CheckThat(model->memory_stats().gradients.peak_in_use_bytes,
                     Eq(plan.in_flight), "bytes at most");
  }));
}

TEST(GradientSyncErrorsTest, AreRefusedByName) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<Net> model,
                          FullyShard(std::make_shared<Net>(), Unowned(world)));
    torch::nn::Module& inner = *model->module()->layers[0];
    for (const absl::Status& status :
         {SetRequiresGradientSync(inner, false),
          SetRequiresAllReduce(inner, false, /*recurse=*/false)}) {
      FSDP_RETURN_IF_ERROR(CheckRefused(status, "no unit"));
    }
    at::Tensor x = Rows(0, 3, kDim).requires_grad_();
    absl::Status inside;
    x.register_hook([&](const at::Tensor& gradient) {
      inside = SetRequiresGradientSync(*model->module(), false);
      return gradient;
    });
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).square().mean()));
    return CheckRefused(inside, "");
  }));
}

}  // namespace
}  // namespace fsdp::testing
