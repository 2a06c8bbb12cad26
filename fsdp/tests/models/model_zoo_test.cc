// Models of the kinds that people train, sharded, against one process that has
// the data of all ranks. After the parity tests of fairscale and PyTorch.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/mesh.h"
#include "comm/testing/late_communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/grad_clip.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/mixed_precision.h"
#include "fsdp/testing/toy_model.h"
#include "fsdp/testing/toy_transformer.h"
#include "fsdp/testing/training_task.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::Mesh;
using ::fsdp::comm::testing::AllOk;
using ::fsdp::comm::testing::Progress;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::comm::testing::StartLast;
using ::fsdp::testing::AdamW;
using ::fsdp::testing::BlockImpl;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::CheckSameRecord;
using ::fsdp::testing::CheckTask;
using ::fsdp::testing::ClipBy;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::LayerUnits;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::MakeTransformer;
using ::fsdp::testing::NamedTensors;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::fsdp::testing::RunPlain;
using ::fsdp::testing::RunSharded;
using ::fsdp::testing::Sequences;
using ::fsdp::testing::Sgd;
using ::fsdp::testing::SumOverRanks;
using ::fsdp::testing::TaskRecord;
using ::fsdp::testing::TensorFunction;
using ::fsdp::testing::TensorsOf;
using ::fsdp::testing::TrainingTask;
using ::fsdp::testing::TransformerImpl;
using ::fsdp::testing::TransformerLoss;
using ::fsdp::testing::Unowned;

constexpr int64_t kDim = 6;

absl::StatusOr<Mesh> Line(Communicator& communicator) {
  return Mesh::Create(Unowned(communicator), {{"shard", -1}});
}

// Mean squared error on three rows per part.
TrainingTask RowsTask(int64_t dim = kDim) {
  TrainingTask task;
  task.loss = [dim](const TensorFunction& forward, int64_t part) {
    const at::Tensor x = Rows(part * 3, 3, dim);
    return Loss(forward(x), x);
  };
  return task;
}

template <typename Net>
std::shared_ptr<Net> Filled() {
  auto net = std::make_shared<Net>();
  FillParameters(*net, 1);
  return net;
}

Options UnitsAt(std::set<std::string> paths) {
  Options options;
  options.wrap_policy = [paths = std::move(paths)](const WrapCandidate& c) {
    return paths.count(c.path) > 0;
  };
  return options;
}

// `task` with a sharded model of `make` on each of `ranks` ranks.
template <typename Net>
void ExpectTrainsAsOneProcess(int ranks, const TrainingTask& task,
                              const std::function<std::shared_ptr<Net>()>& make,
                              const Options& options) {
  EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Mesh mesh, Line(world));
    return CheckTask<Net>(task, make, mesh, options);
  }));
}

// --- Nested units ------------------------------------------------------------

class MiddleImpl : public torch::nn::Module {
 public:
  MiddleImpl()
      : inner(register_module("inner", torch::nn::Linear(4, 16))),
        outer(register_module("outer", torch::nn::Linear(16, 16))) {}
  at::Tensor forward(const at::Tensor& x) {
    return outer->forward(Forward(inner, x).tanh());
  }
  torch::nn::Linear inner;
  torch::nn::Linear outer;
};

class Nested : public torch::nn::Module {
 public:
  Nested()
      : first(register_module("first", torch::nn::Linear(kDim, 4))),
        middle(register_module("middle", std::make_shared<MiddleImpl>())),
        third(register_module("third", torch::nn::Linear(16, 4))),
        last(register_module("last", torch::nn::Linear(4, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(Forward(third, Forward(middle, first->forward(x))));
  }
  torch::nn::Linear first;
  std::shared_ptr<MiddleImpl> middle;
  torch::nn::Linear third;
  torch::nn::Linear last;
};

struct StrategyCase {
  const char* name;
  ShardingStrategy strategy;
  bool reshard_root = false;
};

const StrategyCase kStrategies[] = {
    {"FullShard", ShardingStrategy::kFullShard},
    {"FullShardAndRoot", ShardingStrategy::kFullShard, true},
    {"ShardGradOp", ShardingStrategy::kShardGradOp},
    {"ShardOptimizer", ShardingStrategy::kShardOptimizer},
    {"NoShard", ShardingStrategy::kNoShard},
};

class StrategiesOfModelsTest
    : public ::testing::TestWithParam<std::tuple<int, StrategyCase>> {
 protected:
  // Ranks are threads, which would compete for the cores.
  static void SetUpTestSuite() { at::set_num_threads(1); }
  static int ranks() { return std::get<0>(GetParam()); }
  static Options Apply(Options options) {
    options.unit.strategy = std::get<1>(GetParam()).strategy;
    options.reshard_root_after_forward = std::get<1>(GetParam()).reshard_root;
    return options;
  }
};

TEST_P(StrategiesOfModelsTest, NestedUnitsTrainAsOneProcess) {
  TrainingTask task = RowsTask();
  task.steps = 2;
  ExpectTrainsAsOneProcess<Nested>(
      ranks(), task, Filled<Nested>,
      Apply(UnitsAt({"middle", "middle.inner", "third"})));
}

// Tied embedding, layer norm, batch norm, and gradients that are clipped by
// either norm.
TEST_P(StrategiesOfModelsTest, AClippedTransformerTrainsAsOneProcess) {
  TrainingTask task;
  task.loss = [](const TensorFunction& forward, int64_t part) {
    return TransformerLoss(forward, Sequences(part * 2, 2));
  };
  for (const ClipBy clip :
       {ClipBy{0.1, 2.0},
        ClipBy{0.02, std::numeric_limits<double>::infinity()}}) {
    task.clip = clip;
    ExpectTrainsAsOneProcess<TransformerImpl>(
        ranks(), task,
        [] {
          return MakeTransformer({2, /*batch_norm=*/true});
        },
        Apply(LayerUnits()));
  }
}

INSTANTIATE_TEST_SUITE_P(All, StrategiesOfModelsTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::ValuesIn(kStrategies)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<1>(info.param).name,
                                               "Ranks",
                                               std::get<0>(info.param));
                         });

// --- Sharing -----------------------------------------------------------------

class Scaling : public torch::nn::Module {
 public:
  Scaling(const at::Tensor& weight, const at::Tensor& bias)
      : weight_(register_parameter("weight", weight)),
        bias_(register_parameter("bias", bias)) {}
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight_) + bias_; }
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return bias_; }

 private:
  at::Tensor weight_;
  at::Tensor bias_;
};

class Siblings : public torch::nn::Module {
 public:
  Siblings(bool share_weight, bool share_bias)
      : left(register_module("left",
                             std::make_shared<Scaling>(at::ones({kDim, kDim}),
                                                       at::ones({kDim})))),
        right(register_module(
            "right", std::make_shared<Scaling>(
                         share_weight ? left->weight() : at::ones({kDim, kDim}),
                         share_bias ? left->bias() : at::ones({kDim})))) {
    FillParameters(*this, 2);
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(right, Forward(left, x).tanh());
  }
  std::shared_ptr<Scaling> left;
  std::shared_ptr<Scaling> right;
};

TEST(SharingTest, SiblingUnitsMayShareNothingTheWeightTheBiasOrBoth) {
  for (const bool weight : {false, true}) {
    for (const bool bias : {false, true}) {
      for (const int ranks : {2, 3}) {
        ExpectTrainsAsOneProcess<Siblings>(
            ranks, RowsTask(),
            [&] { return std::make_shared<Siblings>(weight, bias); },
            UnitsAt({"left", "right"}));
      }
    }
  }
}

// --- Freezing ----------------------------------------------------------------

void Freeze(torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) {
    parameter.requires_grad_(false);
  }
}

// The trunk is frozen, either from the start or by dropping its gradients.
TEST(NestedFreezingTest, AFrozenTrunkTrainsAsInOneProcessEitherWay) {
  TrainingTask drops = RowsTask();
  drops.before_step = [](const NamedTensors& named) {
    for (auto [name, tensor] : named) {
      if (!absl::StartsWith(name, "last")) tensor.mutable_grad().reset();
    }
  };
  const auto frozen = [] {
    auto net = Filled<Nested>();
    Freeze(*net->first);
    Freeze(*net->middle);
    Freeze(*net->third);
    return net;
  };
  for (const int ranks : {2, 3}) {
    const Options options = UnitsAt({"middle", "middle.inner", "third"});
    ExpectTrainsAsOneProcess<Nested>(ranks, drops, Filled<Nested>, options);
    ExpectTrainsAsOneProcess<Nested>(ranks, RowsTask(), frozen, options);
  }
}

// --- Uneven parameters -------------------------------------------------------

class UnevenTest : public ::testing::TestWithParam<int> {};

// Nine elements over up to eight ranks, some of which have none.
TEST_P(UnevenTest, OneSgdStepOfA3x3WeightIsExact) {
  EXPECT_OK(RunAllRanks(GetParam(), [](Communicator& world) -> absl::Status {
    const auto options = torch::nn::LinearOptions(3, 3).bias(false);
    torch::nn::Linear linear(options);
    FillParameters(*linear, 0);
    torch::nn::Linear expected(options);
    FillParameters(*expected, 0);
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(linear, Unowned(world)));
    int64_t numel = 0;
    for (const at::Tensor& shard : model->Parameters()) numel += shard.numel();
    FSDP_ASSIGN_OR_RETURN(const double all, SumOverRanks(world, numel));
    if (all != 9) return absl::InternalError(absl::StrCat(all, " elements"));

    torch::optim::SGD optimizer(model->Parameters(), 0.5);
    // Every row of the gradient is x; its mean over ranks has few bits.
    const at::Tensor x = at::ones({1, 3}) * (2 * world.rank() + 1);
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    optimizer.step();
    {
      c10::NoGradGuard no_grad;
      expected->weight.sub_(0.5 * world.world_size());
    }
    return model->ForEachFullParameter(
        [&](const std::string&, const at::Tensor& value) {
          return at::allclose(value, expected->weight, 0, 1e-6)
                     ? absl::OkStatus()
                     : absl::InternalError("the weight differs");
        });
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, UnevenTest,
                         ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

// --- Names and edits ---------------------------------------------------------

TEST(ModelPropertiesTest, NamesAndSizesAreThoseOfTheUnwrappedModel) {
  std::map<std::string, std::vector<int64_t>> expected;
  for (const auto& item : Nested().named_parameters()) {
    expected[item.key()] = item.value().sizes().vec();
  }
  for (const int ranks : {1, 2, 5}) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(Filled<Nested>(), Unowned(world),
                                 UnitsAt({"middle", "middle.inner", "third"})));
      std::map<std::string, std::vector<int64_t>> names;
      for (const NamedShard& named : model->NamedShards()) {
        names[named.name] = named.sizes;
      }
      std::map<std::string, std::vector<int64_t>> visited;
      FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
          [&](const std::string& name, const at::Tensor& value) {
            visited[name] = value.sizes().vec();
            return absl::OkStatus();
          }));
      return names == expected && visited == expected
                 ? absl::OkStatus()
                 : absl::InternalError("other names or sizes");
    }));
  }
}

// fairscale's test_param_change_after_init.
TEST(ModelPropertiesTest, EditsBeforeTheFirstForwardAreUsed) {
  for (const int ranks : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(ranks, [](Communicator& world) -> absl::Status {
      const auto edited = Filled<Nested>();
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(Filled<Nested>(), Unowned(world),
                                       UnitsAt({"middle", "third"})));
      {
        c10::NoGradGuard no_grad;
        for (at::Tensor& p : edited->parameters()) p.mul_(0.5).add_(0.01);
        for (at::Tensor& p : model->Parameters()) p.mul_(0.5).add_(0.01);
      }
      FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                            RunSharded(RowsTask(), model));
      return CheckSameRecord(
          actual, RunPlain(RowsTask(), edited, world.world_size()), 1e-5);
    }));
  }
}

TEST(ModelPropertiesTest, AScopeOfFullParametersLeavesBuffersInTheirDtype) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = LayerUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.unit.precision.buffer_dtype = at::kBFloat16;
    options.unit.precision.keep_full_precision = [](const torch::nn::Module&) {
      return false;
    };
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeTransformer({1, /*batch_norm=*/true}),
                                     Unowned(world), options));
    FSDP_ASSIGN_OR_RETURN(const FullParamsScope full,
                          model->SummonFullParams());
    for (const auto& item : model.module()->named_buffers()) {
      const bool counts = item.value().scalar_type() == at::kLong;
      if (!counts && item.value().scalar_type() != at::kBFloat16) {
        return absl::InternalError(absl::StrCat("buffer ", item.key()));
      }
    }
    for (const auto& item : model.module()->named_parameters()) {
      if (item.value().scalar_type() != at::kFloat) {
        return absl::InternalError(absl::StrCat("parameter ", item.key()));
      }
    }
    return absl::OkStatus();
  }));
}

// --- Autocast ----------------------------------------------------------------

// While it lives, this thread computes in bf16 what autocast knows of.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() > 0) return;
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

// A region over many steps sees what the optimizer has written: parameters are
// no leaves in forward, so that autocast keeps no copies of them.
TEST(AutocastTest, OneRegionOverAllStepsTrainsAsARegionForEachForward) {
  TrainingTask task = RowsTask();
  task.loss = [](const TensorFunction& forward, int64_t part) {
    const at::Tensor x = Rows(part * 3, 3, kDim);
    const Autocast on;
    const at::Tensor y = forward(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    return Loss(y.to(at::kFloat), x);
  };
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits()));
    auto region = std::make_unique<Autocast>();
    FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, RunSharded(task, model));
    region.reset();
    return CheckSameRecord(
        actual, RunPlain(task, MakeNet(kDim, 2), world.world_size()), 1e-2);
  }));
}

// --- Parameter groups --------------------------------------------------------

// Biases at a rate of their own and without decay, the head frozen out of the
// optimizer.
TEST(ParameterGroupsTest, EachParameterHasTheOptionsOfItsGroup) {
  TrainingTask task = RowsTask();
  task.optimizer = [](const NamedTensors& named) {
    NamedTensors weights;
    NamedTensors biases;
    for (const auto& item : named) {
      if (item.first == "head.weight") continue;
      (absl::EndsWith(item.first, "bias") ? biases : weights).push_back(item);
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(TensorsOf(weights));
    groups.emplace_back(TensorsOf(biases),
                        std::make_unique<torch::optim::AdamWOptions>(
                            torch::optim::AdamWOptions(0.03).weight_decay(0)));
    return std::make_unique<torch::optim::AdamW>(
        std::move(groups), torch::optim::AdamWOptions(1e-2).weight_decay(0.5));
  };
  for (const int ranks : {1, 2, 3, 5}) {
    ExpectTrainsAsOneProcess<NetImpl>(
        ranks, task, [] { return MakeNet(kDim, 2); }, BlockUnits());
  }
}

// --- Mixture of experts ------------------------------------------------------

constexpr int kMoeRanks = 4;
constexpr int64_t kExpertRows = 3;

std::shared_ptr<BlockImpl> MakeExpert(int number) {
  auto expert = std::make_shared<BlockImpl>(kDim);
  FillParameters(*expert, 100 * number);
  return expert;
}

// Between two shared units an expert, which is a plain module or a sharded
// model of its own.
template <typename Expert>
class Mixture : public torch::nn::Module {
 public:
  explicit Mixture(Expert expert_module)
      : in(register_module("in", torch::nn::Linear(kDim, kDim))),
        out(register_module("out", torch::nn::Linear(kDim, kDim))) {
    FillParameters(*this, 3);
    expert = register_module("expert", std::move(expert_module));
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(out, expert->forward(Forward(in, x)).tanh());
  }
  torch::nn::Linear in;
  torch::nn::Linear out;
  Expert expert = nullptr;
};

// All experts in one process; part p goes to expert p % ranks / group.
struct PlainMixture {
  std::vector<std::shared_ptr<Mixture<std::shared_ptr<BlockImpl>>>> experts;

  explicit PlainMixture(int count) {
    for (int e = 0; e < count; ++e) {
      experts.push_back(
          std::make_shared<Mixture<std::shared_ptr<BlockImpl>>>(MakeExpert(e)));
      // All of them have the same shared layers.
      if (e > 0) {
        experts[e]->in = experts[0]->in;
        experts[e]->out = experts[0]->out;
      }
    }
  }
  std::vector<at::Tensor> Parameters() const {
    std::vector<at::Tensor> result = experts[0]->in->parameters();
    for (const at::Tensor& p : experts[0]->out->parameters()) {
      result.push_back(p);
    }
    for (const auto& expert : experts) {
      for (const at::Tensor& p : expert->expert->parameters()) {
        result.push_back(p);
      }
    }
    return result;
  }
};

at::Tensor ExpertLoss(const TensorFunction& forward, int64_t part) {
  const at::Tensor x = Rows(part * kExpertRows, kExpertRows, kDim);
  return Loss(forward(x), x);
}

struct MoeRecord {
  std::vector<double> losses;
  std::vector<double> norms;
};

// The gradient of an expert is the mean over the ranks that have it.
MoeRecord TrainPlainMixture(int group, int steps, double max_norm) {
  MoeRecord record;
  const int count = kMoeRanks / group;
  PlainMixture mixture(count);
  const std::vector<at::Tensor> parameters = mixture.Parameters();
  torch::optim::AdamW optimizer(parameters, 1e-2);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int rank = 0; rank < kMoeRanks; ++rank) {
      auto& net = *mixture.experts[rank / group];
      const at::Tensor loss =
          ExpertLoss([&](const at::Tensor& x) { return net.forward(x); },
                     step * kMoeRanks + rank) /
          kMoeRanks;
      loss.backward();
      sum += loss.item<double>();
    }
    for (const auto& expert : mixture.experts) {
      for (at::Tensor& p : expert->expert->parameters()) {
        p.mutable_grad().mul_(count);
      }
    }
    record.losses.push_back(sum);
    record.norms.push_back(
        torch::nn::utils::clip_grad_norm_(parameters, max_norm));
    optimizer.step();
  }
  return record;
}

// `model` and the shards of its expert, which it knows nothing of.
template <typename Net>
absl::StatusOr<MoeRecord> TrainMixture(FullyShardedDataParallel<Net>& model,
                                       const std::vector<NamedShard>& expert,
                                       int steps, double max_norm) {
  MoeRecord record;
  Communicator& world = model->communicator();
  std::vector<NamedShard> all = model->NamedShards();
  all.insert(all.end(), expert.begin(), expert.end());
  std::vector<at::Tensor> tensors;
  for (const NamedShard& named : all) tensors.push_back(named.shard);
  torch::optim::AdamW optimizer(tensors, 1e-2);
  ClipGradNormOptions clip;
  clip.max_norm = max_norm;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss =
        ExpertLoss([&](const at::Tensor& x) { return model->forward(x); },
                   step * kMoeRanks + world.rank());
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    FSDP_ASSIGN_OR_RETURN(const double sum,
                          SumOverRanks(world, loss.item<double>()));
    record.losses.push_back(sum / kMoeRanks);
    FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                          ClipGradNorm(world, all, clip));
    record.norms.push_back(norm.item<double>());
    optimizer.step();
  }
  return record;
}

absl::Status CheckSameMoe(const MoeRecord& actual, const MoeRecord& expected) {
  return CheckSameRecord({actual.losses, actual.norms, {}},
                         {expected.losses, expected.norms, {}}, 1e-5);
}

Options MixtureOptions() {
  Options options = UnitsAt({"in", "out"});
  options.ignore.module = [](const std::string& path,
                             const torch::nn::Module&) {
    return path == "expert";
  };
  return options;
}

class MixtureOfExpertsTest : public ::testing::TestWithParam<double> {};

TEST_P(MixtureOfExpertsTest, AnIgnoredExpertIsEachRanksOwn) {
  const MoeRecord expected = TrainPlainMixture(1, 4, GetParam());
  EXPECT_OK(RunAllRanks(kMoeRanks, [&](Communicator& world) -> absl::Status {
    const auto expert = MakeExpert(world.rank());
    const auto net =
        std::make_shared<Mixture<std::shared_ptr<BlockImpl>>>(expert);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(world), MixtureOptions()));
    std::vector<NamedShard> own;
    for (const auto& item : expert->named_parameters()) {
      own.push_back({item.key(), item.value().sizes().vec(), item.value(), 0});
    }
    FSDP_ASSIGN_OR_RETURN(const MoeRecord actual,
                          TrainMixture(model, own, 4, GetParam()));
    return CheckSameMoe(actual, expected);
  }));
}

// Experts that `group` consecutive ranks share.
absl::Status CheckShardedExpert(Communicator& world, int group,
                                double max_norm) {
  using Expert = FullyShardedDataParallel<BlockImpl>;
  const int number = world.rank() / group;
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> peers,
                        world.Split(number, world.rank()));
  FSDP_ASSIGN_OR_RETURN(Expert expert, FullyShard(MakeExpert(number), peers));
  const auto net = std::make_shared<Mixture<Expert>>(expert);
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(net, Unowned(world), MixtureOptions()));
  FSDP_ASSIGN_OR_RETURN(
      const MoeRecord actual,
      TrainMixture(model, expert->NamedShards(), 4, max_norm));
  return CheckSameMoe(actual, TrainPlainMixture(group, 4, max_norm));
}

TEST_P(MixtureOfExpertsTest, AnExpertMayBeShardedOverAGroupOfItsOwn) {
  for (const int group : {1, 2}) {
    EXPECT_OK(RunAllRanks(kMoeRanks, [&](Communicator& world) {
      return CheckShardedExpert(world, group, GetParam());
    }));
  }
}

TEST_P(MixtureOfExpertsTest, ARankThatIsAlwaysLateChangesNothing) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(kMoeRanks));
  Progress progress(kMoeRanks);
  for (auto& communicator : group) {
    std::set<comm::Collective> late;
    if (communicator->rank() == 1) {
      late = {comm::Collective::kAllGather, comm::Collective::kReduceScatter};
    }
    communicator = StartLast(std::move(communicator), &progress, late);
  }
  EXPECT_OK(AllOk(RunRanks(group, [](Communicator& world) {
    return CheckShardedExpert(world, /*group=*/2, GetParam());
  })));
}

INSTANTIATE_TEST_SUITE_P(MaxNorms, MixtureOfExpertsTest,
                         ::testing::Values(1000.0, 0.1), [](const auto& info) {
                           return info.param > 1 ? "NotClipped" : "Clipped";
                         });

}  // namespace
}  // namespace fsdp
