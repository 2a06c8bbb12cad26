// Units with some frozen parameters: what is reduced, the memory of gradients,
// and their values; changes of what is trained.
#include <ATen/ops/zeros.h>

#include <cstdlib>

#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kWidth = 14;
constexpr int kLayers = 2;

// A unit that computes tanh(linear(x) + x a^T b).
class LayerImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return (linear->forward(x) + x.matmul(lora_a.t()).matmul(lora_b)).tanh();
  }

  Linear linear = register_module("linear", Linear(kWidth, kWidth));
  at::Tensor lora_a = register_parameter("lora_a", at::zeros({2, kWidth}));
  at::Tensor lora_b = register_parameter("lora_b", at::zeros({2, kWidth}));
};

class Net : public torch::nn::Module {
 public:
  Net() : head(register_module("head", Linear(kWidth, 3))) {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(absl::StrCat("layer", i),
                                       std::make_shared<LayerImpl>()));
    }
    FillParameters(*this, 1);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = Forward(layer, x);
    return head->forward(x);
  }
  std::vector<std::shared_ptr<LayerImpl>> layers;
  Linear head;
};

bool IsLora(const std::string& name) { return absl::StrContains(name, "lora"); }
bool IsBias(const std::string& name) { return absl::StrContains(name, "bias"); }
bool IsAny(const std::string&) { return true; }
using Trains = bool (*)(const std::string& name);

// Sets requires_grad as a user does, on the module's own tensors.
void SetTrained(torch::nn::Module& net, Trains trains) {
  for (auto& item : net.named_parameters()) {
    item.value().set_requires_grad(trains(item.key()));
  }
}

// Returns the loss on the rank's own rows.
template <typename Model>
at::Tensor LossOf(Model& model, int rank, int turn) {
  return model.forward(Rows(100 * turn + 7 * rank, 3, kWidth)).square().mean();
}

// Computes every rank with plain LibTorch, and the mean.
class Plain {
 public:
  explicit Plain(int ranks) {
    for (int i = 0; i < ranks; ++i) nets_.push_back(std::make_shared<Net>());
  }
  void Backward(Trains trains, int turn) {
    for (size_t rank = 0; rank < nets_.size(); ++rank) {
      SetTrained(*nets_[rank], trains);
      LossOf(*nets_[rank], static_cast<int>(rank), turn).backward();
    }
  }
  void ZeroGrad() {
    for (const auto& net : nets_) net->zero_grad();
  }
  void DropFrozen() {
    for (const auto& net : nets_) {
      for (const at::Tensor& value : net->parameters()) {
        if (!value.requires_grad()) value.mutable_grad().reset();
      }
    }
  }
  Gradients Means() const { return MeansOf(nets_); }

 private:
  std::vector<std::shared_ptr<Net>> nets_;
};

absl::Status CheckGradients(const ShardedModuleBase& model, const Plain& plain,
                            absl::string_view when) {
  return Annotate(CheckOwnGradients(model, plain.Means(), 1e-5, 1e-7), when);
}

struct Case {
  const char* name;
  int ranks;
  bool shares_memory;
  bool offloads;
  int replicas = 1;
};

Options LayerUnits(const Case& c) {
  Options options = UnitsOf<LayerImpl>();
  if (c.offloads) {
    options.offload.gradients = Tier::kSsd;
    options.offload.directory = std::getenv("TEST_TMPDIR");
  }
  if (c.replicas > 1) options.unit.strategy = ShardingStrategy::kHybridShard;
  return options;
}

class PartlyTrainedTest : public ::testing::TestWithParam<Case> {
 protected:
  void Run(const comm::testing::RankFunction& fn) {
    ASSERT_OK_AND_ASSIGN(const auto group,
                         MakeGroup(GetParam().ranks, GetParam().shares_memory));
    EXPECT_OK(AllOk(RunRanks(group, fn)));
  }
};

// Runs two backwards of a model that trains `trains` and was frozen before or
// after sharding. Returns the bytes that one of them reduces, or gradients have
// on one rank.
absl::StatusOr<int64_t> CheckMoved(const Case& c, Communicator& world,
                                   Trains trains, bool freeze_first) {
  CollectiveLog log;
  auto net = std::make_shared<Net>();
  if (freeze_first) SetTrained(*net, trains);
  FSDP_ASSIGN_OR_RETURN(auto own, world.Split(0, world.rank()));
  const std::shared_ptr<Communicator> recorded =
      comm::Record(std::move(own), &log);
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, recorded, LayerUnits(c)));
  for (const TensorRange& named : model->Ranges()) {
    FSDP_RETURN_IF_ERROR(model->SetTrainable(named.name, trains(named.name)));
  }
  int64_t moved = 0;
  const MemoryPlan plan = model->PlanMemory();
  Plain plain(c.ranks);
  for (int turn = 0; turn < 2; ++turn) {
    log.Clear();
    plain.Backward(trains, turn);
    FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model, world.rank(), turn)));
    FSDP_RETURN_IF_ERROR(CheckGradients(*model, plain, "a backward"));
    moved = log.TotalsOf(Collective::kReduceScatter).bytes;
    if (c.ranks > 1 && !c.offloads) EXPECT_EQ(moved, plan.gradients * c.ranks);
  }
  if (c.offloads) EXPECT_EQ(plan.gradients, 0);
  const int64_t in_flight = model->memory_stats().gradients.peak_in_use_bytes;
  EXPECT_EQ(plan.in_flight, in_flight);
  return c.ranks > 1 ? moved : plan.gradients;
}

TEST_P(PartlyTrainedTest, OnlyWhatIsTrainedIsReducedAndHasMemory) {
  const Case& c = GetParam();
  if (c.replicas > 1) GTEST_SKIP() << "replicas have a part of each segment";
  Run([&c](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const int64_t of_all,
                          CheckMoved(c, world, IsAny, /*freeze_first=*/true));
    for (const Trains trains : {IsLora, IsBias}) {
      FSDP_ASSIGN_OR_RETURN(
          const int64_t spread,
          CheckMoved(c, world, trains, /*freeze_first=*/true));
      FSDP_ASSIGN_OR_RETURN(
          const int64_t in_place,
          CheckMoved(c, world, trains, /*freeze_first=*/false));
      EXPECT_TRUE(spread <= of_all / 3 && spread <= in_place &&
                  in_place <= of_all)
          << "of " << of_all << " bytes " << spread << " and " << in_place;
    }
    return absl::OkStatus();
  });
}

// Gradients accumulate over backwards, kept whole or not, while the trained
// parameters change. In the end some are frozen that have only whole ones.
TEST_P(PartlyTrainedTest, WhatIsTrainedChangesBetweenBackwards) {
  const Case& c = GetParam();
  struct Turn {
    Trains trains;
    bool reduces;
    bool zeroes;
  };
  const std::vector<Turn> turns = {
      {IsLora, true, false}, {IsBias, true, false},  {IsBias, true, false},
      {IsAny, true, false},  {IsLora, true, true},   {IsAny, true, false},
      {IsLora, false, true}, {IsBias, false, false}, {IsAny, true, false},
      {IsAny, false, false}, {IsAny, true, false},   {IsBias, false, true},
      {IsBias, true, false}, {IsLora, true, false},  {IsAny, false, true},
      {IsLora, true, false},
  };
  Run([&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world),
                     {{"replicate", c.replicas}, {"shard", -1}}));
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(std::make_shared<Net>(), mesh, LayerUnits(c)));
    Plain plain(c.ranks);
    for (size_t i = 0; i < turns.size(); ++i) {
      const int turn = static_cast<int>(i);
      if (turns[i].zeroes) {
        plain.ZeroGrad();
        model->zero_grad();
      }
      plain.Backward(turns[i].trains, turn);
      SetTrained(*model->module(), turns[i].trains);
      std::optional<NoSyncScope> no_sync;
      if (!turns[i].reduces) no_sync.emplace(model->NoSync());
      FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model, world.rank(), turn)));
      if (!turns[i].reduces) continue;
      if (i + 1 == turns.size()) plain.DropFrozen();
      FSDP_RETURN_IF_ERROR(
          CheckGradients(*model, plain, absl::StrCat("turn ", i)));
    }
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, PartlyTrainedTest,
    ::testing::Values(
        Case{"One", 1, false, false}, Case{"Two", 2, false, false},
        Case{"Three", 3, false, false}, Case{"Five", 5, false, false},
        Case{"OneSharing", 1, true, false}, Case{"TwoSharing", 2, true, false},
        Case{"ThreeSharing", 3, true, false},
        Case{"FiveSharing", 5, true, false},
        Case{"TwoOffloading", 2, false, true},
        Case{"ThreeSharingAndOffloading", 3, true, true},
        Case{"FourOfTwoReplicas", 4, false, false, 2}),
    [](const auto& info) { return std::string(info.param.name); });

// Checks that no rank takes its own gradients for the mean if nothing of the
// unit was trained when it was sharded and nothing is left to divide.
absl::Status CheckThawed(const Mesh& mesh, ShardingStrategy strategy,
                         Communicator& world) {
  Options options = LayerUnits({});
  options.unit.strategy = strategy;
  options.gradients.divide_factor = 1;
  auto net = std::make_shared<Net>();
  SetTrained(*net, IsLora);  // the root's unit has no such parameter
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, mesh, options));
  const int ranks = world.world_size();
  Plain plain(ranks);
  for (const int turn : {0, 1}) {
    const Trains trains = turn == 0 ? IsLora : IsAny;
    for (const TensorRange& named : model->Ranges()) {
      FSDP_RETURN_IF_ERROR(model->SetTrainable(named.name, trains(named.name)));
    }
    plain.Backward(trains, turn);
    const at::Tensor loss = LossOf(*model, world.rank(), turn);
    FSDP_RETURN_IF_ERROR(model->Backward(loss / ranks));
    FSDP_RETURN_IF_ERROR(
        CheckGradients(*model, plain, absl::StrCat("turn ", turn)));
  }
  return absl::OkStatus();
}

TEST(PartlyTrainedReplicasTest, WhatIsTrainedSinceIsTheSumOverAll) {
  for (const int ranks : {1, 2, 3}) {
    for (const ShardingStrategy strategy :
         {ShardingStrategy::kNoShard, ShardingStrategy::kHybridShard,
          ShardingStrategy::kHybridShardGradOp}) {
      SCOPED_TRACE(absl::StrCat(ToString(strategy), " of ", ranks));
      EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            const Mesh mesh,
            Mesh::Create(Unowned(world), {{"replicate", ranks}, {"shard", 1}}));
        return CheckThawed(mesh, strategy, world);
      }));
    }
  }
}

// lora_a and lora_b are equally large, so ranks would send equally much.
TEST(PartlyTrainedErrorsTest, RanksThatTrainOthersAreRefused) {
  const auto run = [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<Net>();
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(world), LayerUnits({})));
    for (const auto& layer : net->layers) {
      (world.rank() == 0 ? layer->lora_a : layer->lora_b)
          .set_requires_grad(false);
    }
    return model->Backward(LossOf(*model, 0, 0));
  };
  for (const absl::Status& status : RunRanks(2, run)) {
    EXPECT_THAT(status.ToString(), HasSubstr("layer1 (trains 3 of 4"));
  }
}

TEST(FreezingTest, ATiedParameterIsFrozenByAnyOfItsNames) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = Filled<Mlp>();
    FSDP_RETURN_IF_ERROR(Tie(net->first->weight, net->third->weight));
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    FSDP_RETURN_IF_ERROR(model->SetTrainable("third.weight", false));
    return Check(!model->Parameters().front().requires_grad(),
                 "still trainable");
  }));
}

}  // namespace
}  // namespace fsdp::testing
