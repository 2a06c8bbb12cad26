// Sharded models of common kinds, compared with one process that has the data
// of all ranks. Follows the parity tests of fairscale and PyTorch.
#include <ATen/autocast_mode.h>
#include <torch/optim/adamw.h>

#include "fsdp/optim/training_step.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 6;

// An optimizer leaves alone what has no gradient.
TEST(NestedFreezingTest, ATrunkWhoseGradientsAreDroppedStaysAsItIs) {
  TrainingTask drops = ToyTask();
  drops.before_step = [](const NamedTensors& named) {
    for (const auto& [name, tensor] : named) {
      if (!absl::StartsWith(name, "head")) tensor.mutable_grad().reset();
    }
  };
  for (const int ranks : {2, 3}) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
      return CheckToy(drops, mesh, BlockUnits());
    }));
  }
}

class UnevenTest : public ::testing::TestWithParam<int> {};

// Nine elements lie over up to eight ranks, some of which have none.
TEST_P(UnevenTest, A3x3WeightTrainsAsInOneProcess) {
  const auto make = [] {
    Linear linear(torch::nn::LinearOptions(3, 3).bias(false));
    FillParameters(*linear, 0);
    return linear.ptr();
  };
  EXPECT_OK(RunAllRanks(GetParam(), [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(make(), Unowned(world)));
    return CheckTrains(model, make(), /*dim=*/3);
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, UnevenTest,
                         ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

// While it lives, autocast lets this thread compute in bf16.
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

// One region over many steps sees what the optimizer has written: in forward,
// parameters are no leaves, so autocast keeps no copies of them.
TEST(AutocastTest, OneRegionOverAllStepsTrainsAsARegionForEachForward) {
  TrainingTask task;
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

constexpr int kMoeRanks = 4;
constexpr int kMoeSteps = 4;
constexpr int64_t kExpertRows = 3;

std::shared_ptr<BlockImpl> MakeExpert(int number) {
  auto expert = std::make_shared<BlockImpl>(kDim);
  FillParameters(*expert, 100 * number);
  return expert;
}

// An expert between two shared units: a plain module, or a sharded model of its
// own.
template <typename Expert>
class Mixture : public torch::nn::Module {
 public:
  explicit Mixture(Expert expert_module)
      : in(register_module("in", Linear(kDim, kDim))),
        out(register_module("out", Linear(kDim, kDim))) {
    FillParameters(*this, 3);
    expert = register_module("expert", std::move(expert_module));
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(out, expert->forward(Forward(in, x)).tanh());
  }
  Linear in;
  Linear out;
  Expert expert = nullptr;
};

at::Tensor ExpertLoss(const TensorFunction& forward, int64_t part) {
  const at::Tensor x = Rows(part * kExpertRows, kExpertRows, kDim);
  return Loss(forward(x), x);
}

// Trains all experts in one process; rank r has expert r / group. The gradient
// of an expert is the mean over the ranks that have it. Records no parameters.
TaskRecord TrainPlainMixture(int group, double max_norm) {
  using Net = Mixture<std::shared_ptr<BlockImpl>>;
  TaskRecord record;
  const int count = kMoeRanks / group;
  std::vector<std::shared_ptr<Net>> nets;  // with the same shared layers
  std::vector<at::Tensor> parameters;
  for (int e = 0; e < count; ++e) {
    const auto& net = nets.emplace_back(std::make_shared<Net>(MakeExpert(e)));
    net->in = nets[0]->in;
    net->out = nets[0]->out;
    for (const at::Tensor& p : net->expert->parameters()) {
      parameters.push_back(p);
    }
  }
  for (const Linear& shared : {nets[0]->in, nets[0]->out}) {
    for (const at::Tensor& p : shared->parameters()) parameters.push_back(p);
  }
  torch::optim::AdamW optimizer(parameters, 1e-2);
  for (int step = 0; step < kMoeSteps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int rank = 0; rank < kMoeRanks; ++rank) {
      const at::Tensor loss = ExpertLoss(
                                  [&](const at::Tensor& x) {
                                    return nets[rank / group]->forward(x);
                                  },
                                  step * kMoeRanks + rank) /
                              kMoeRanks;
      loss.backward();
      sum += loss.item<double>();
    }
    for (const auto& net : nets) {
      for (at::Tensor& p : net->expert->parameters()) {
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

// Trains `model` and the shards of its expert, of which the model knows
// nothing.
template <typename Net>
absl::StatusOr<TaskRecord> TrainMixture(FullyShardedDataParallel<Net>& model,
                                        const std::vector<TensorRange>& expert,
                                        double max_norm) {
  TaskRecord record;
  Communicator& world = model->communicator();
  std::vector<TensorRange> all = model->Ranges();
  all.insert(all.end(), expert.begin(), expert.end());
  std::vector<at::Tensor> tensors;
  tensors.reserve(all.size());
  for (const TensorRange& named : all) tensors.push_back(named.values);
  torch::optim::AdamW optimizer(tensors, 1e-2);
  ClipGradNormOptions clip;
  clip.max_norm = max_norm;
  for (int step = 0; step < kMoeSteps; ++step) {
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

Options MixtureOptions() {
  Options options;
  options.wrap_policy = [](const WrapCandidate& candidate) {
    return candidate.path == "in" || candidate.path == "out";
  };
  options.ignore.module = [](const std::string& path,
                             const torch::nn::Module&) {
    return path == "expert";
  };
  return options;
}

class MixtureOfExpertsTest : public ::testing::TestWithParam<double> {};

// An expert is sharded over `group` consecutive ranks, and ignored around it.
TEST_P(MixtureOfExpertsTest, AnExpertMayBeShardedOverAGroupOfItsOwn) {
  using Expert = FullyShardedDataParallel<BlockImpl>;
  for (const int group : {1, 2}) {
    const TaskRecord expected = TrainPlainMixture(group, GetParam());
    EXPECT_OK(RunAllRanks(kMoeRanks, [&](Communicator& world) -> absl::Status {
      const int number = world.rank() / group;
      FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> peers,
                            world.Split(number, world.rank()));
      FSDP_ASSIGN_OR_RETURN(auto expert, FullyShard(MakeExpert(number), peers));
      const auto net = std::make_shared<Mixture<Expert>>(expert);
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(net, Unowned(world), MixtureOptions()));
      FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                            TrainMixture(model, expert->Ranges(), GetParam()));
      return CheckSameRecord(actual, expected, 1e-5);
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(MaxNorms, MixtureOfExpertsTest,
                         ::testing::Values(1000.0, 0.1), [](const auto& info) {
                           return info.param > 1 ? "NotClipped" : "Clipped";
                         });

}  // namespace
}  // namespace fsdp::testing
