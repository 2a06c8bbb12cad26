// Wherever parameters, gradients and optimizer states rest, training gives the
// bits that it gives with all of them in memory.

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <cstdlib>

#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/trained_values.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::testing::Fault;

using Model = FullyShardedDataParallel<NetImpl>;

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;
constexpr int64_t kRows = 3;  // of a rank and backward

// A training, apart from where things rest: each step accumulates, with and
// without NoSync(), clips, and zeroes gradients to none or zero.
struct OffloadScenario {
  std::string name;
  int world_size = 2;
  std::function<void(Options&)> configure = [](Options&) {};
  bool scaler = false;  // gradients are scaled
  // Called before each step.
  std::function<absl::Status(Model&, torch::optim::Optimizer&, int step)>
      before_step = [](Model&, torch::optim::Optimizer&, int) {
        return absl::OkStatus();
      };
};

struct OffloadRecord {
  std::vector<double> losses;  // of this rank, and norms
  Values tensors;              // parameters and states, whole
  std::map<std::string, int64_t> numbers;
};

// If nothing has left memory, nothing was compared.
void ExpectTraffic(const Model& model) {
  const OffloadSpace* const space = model->sharded_model().offload();
  for (int kind = 0; space != nullptr && kind < kNumRestingKinds; ++kind) {
    const bool moves = space->plan().bytes[kind].ssd > 0;
    EXPECT_EQ(moves, (space->stats().stores[kind].writes.bytes > 0))
        << "another traffic than planned of kind " << kind;
  }
}

// Trains on this rank; all ranks must do the same.
absl::StatusOr<OffloadRecord> Train(const OffloadScenario& scenario,
                                    Communicator& world,
                                    const OffloadOptions& offload) {
  Options options = BlockUnits();
  scenario.configure(options);
  options.offload = offload;
  options.offload.optimizer_state = 3;
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
  FSDP_ASSIGN_OR_RETURN(Model model,
                        FullyShard(MakeNet(kDim, kBlocks), mesh, options));
  FusedAdamW optimizer(model->Parameters(),
                       torch::optim::AdamWOptions(1e-2).amsgrad(true));
  GradScalerOptions scaling;
  scaling.init_scale = scenario.scaler ? 1024 : 1;
  scaling.growth_interval = 7;
  FSDP_ASSIGN_OR_RETURN(auto scaler, ShardedGradScaler::Create(world, scaling));
  OffloadRecord record;
  for (int step = 0; step < 20; ++step) {
    FSDP_RETURN_IF_ERROR(scenario.before_step(model, optimizer, step));
    model->zero_grad(/*set_to_none=*/step % 2 == 0);
    for (int micro = 0; micro < 2; ++micro) {
      std::optional<NoSyncScope> no_sync;
      if (micro == 0 && step % 3 == 0) no_sync.emplace(model->NoSync());
      const int64_t part =
          (2 * step + micro) * world.world_size() + world.rank();
      const at::Tensor x = Rows(part * kRows, kRows, kDim);
      const at::Tensor loss = Loss(model->forward(x), x);
      record.losses.push_back(loss.item<double>());
      FSDP_RETURN_IF_ERROR(
          model->Backward(scenario.scaler ? scaler.Scale(loss) : loss));
    }
    if (scenario.scaler) {
      FSDP_RETURN_IF_ERROR(scaler.Unscale(model->Ranges()).status());
    }
    FSDP_ASSIGN_OR_RETURN(const at::Tensor norm, model->ClipGradNorm(0.5));
    record.losses.push_back(norm.item<double>());
    if (scenario.scaler) {
      FSDP_RETURN_IF_ERROR(scaler.Step(optimizer, model->Ranges()).status());
      FSDP_RETURN_IF_ERROR(scaler.Update());
    } else {
      optimizer.step();
    }
  }
  FSDP_ASSIGN_OR_RETURN(record.tensors, ValuesOf(*model, optimizer));
  FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                        model->GatherOptimizerState(optimizer));
  record.numbers = states.numbers;
  ExpectTraffic(model);
  return record;
}

// Returns Internal with the first difference in any bit.
absl::Status CheckSameBits(const OffloadRecord& actual,
                           const OffloadRecord& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.numbers, expected.numbers);
  return CheckEqual(actual.tensors, expected.tensors);
}

struct Placing {
  std::string name;
  OffloadOptions offload;
};

// Users have files; stores in memory are faster, so tests can try more.
OffloadOptions OnFiles(Tier parameters, Tier gradients, Tier optimizer) {
  OffloadOptions offload;
  offload.parameters = parameters;
  offload.gradients = gradients;
  offload.optimizer = optimizer;
  offload.directory = std::getenv("TEST_TMPDIR");
  offload.block_bytes = 4096;
  return offload;
}

OffloadOptions InMemory(Tier parameters, Tier gradients, Tier optimizer) {
  OffloadOptions offload = OnFiles(parameters, gradients, optimizer);
  offload.rollback = false;
  offload.make_store = [](RestingKind, int64_t capacity)
      -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
    return offload::HostStore::Make(capacity);
  };
  return offload;
}

// Delays every third transfer.
OffloadOptions Hesitating() {
  OffloadOptions offload = InMemory(Tier::kSsd, Tier::kSsd, Tier::kSsd);
  offload.make_store = [](RestingKind, int64_t capacity)
      -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
    FSDP_ASSIGN_OR_RETURN(auto store, offload::HostStore::Make(capacity));
    std::vector<Fault> faults;
    for (int64_t nth = 0; nth < 400; nth += 3) {
      Fault& fault = faults.emplace_back();
      fault.nth = nth;
      fault.effect = Fault::Effect::kDelay;
      fault.delay = absl::Milliseconds(nth % 4);
    }
    return offload::testing::WithFaults(std::move(store), std::move(faults));
  };
  return offload;
}

OffloadOptions WithBudget(OffloadOptions offload, int64_t bytes) {
  offload.memory_budget = bytes;
  return offload;
}

OffloadOptions WithBuffers(OffloadOptions offload, int64_t bytes,
                           int distance) {
  offload.buffer_bytes = bytes;
  offload.prefetch_distance = distance;
  return offload;
}

std::vector<Placing> Placings() {
  constexpr Tier kHere = Tier::kDevice;
  constexpr Tier kSsd = Tier::kSsd;
  return {
      {"Parameters", InMemory(kSsd, kHere, kHere)},
      {"Gradients", InMemory(kHere, kSsd, kHere)},
      {"Optimizer", InMemory(kHere, kHere, kSsd)},
      {"All", InMemory(kSsd, kSsd, kSsd)},
      {"AllOnFiles", OnFiles(kSsd, kSsd, kSsd)},
      {"OptimizerOnFiles", OnFiles(kHere, kHere, kSsd)},
      {"Hesitating", Hesitating()},
      {"Budget", WithBudget(InMemory(kSsd, kSsd, kSsd), 60 << 10)},
      {"LittleMemory", WithBuffers(InMemory(kSsd, kSsd, kSsd), 40 << 10, 0)},
      {"Cpu", InMemory(Tier::kCpu, Tier::kCpu, Tier::kCpu)},
  };
}

// Replaces values, and what is trained.
absl::Status Disturb(Model& model, torch::optim::Optimizer&, int step) {
  if (step == 8) {
    FSDP_ASSIGN_OR_RETURN(FullParamsScope scope, model->SummonFullParams());
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.module()->parameters()) {
      parameter.mul_(0.75);
    }
    FSDP_RETURN_IF_ERROR(scope.Close());
  }
  if (step == 12) {
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [](const std::string&, const at::Tensor& value) {
          value.add_(0.01);
          return absl::OkStatus();
        },
        VisitOptions{/*writeback=*/true}));
  }
  if (step % 6 != 2 && step % 6 != 5) return absl::OkStatus();
  return model->SetTrainable("blocks.1.fc.weight", step % 6 == 5);
}

// Gives a parameter a group of its own with another learning rate.
absl::Status Regroup(Model&, torch::optim::Optimizer& optimizer, int step) {
  if (step != 6 && step != 13) return absl::OkStatus();
  std::vector<at::Tensor>& params = optimizer.param_groups()[0].params();
  const at::Tensor moved = params.back();
  params.pop_back();
  auto options = optimizer.param_groups()[0].options().clone();
  options->set_lr(1e-3);
  // This is not add_param_group(), which wants parameters without states.
  optimizer.param_groups().emplace_back(std::vector<at::Tensor>{moved},
                                        std::move(options));
  return absl::OkStatus();
}

// Evaluates in some steps, and adds the mean output to the parameters.
absl::Status EvaluateNowAndThen(Model& model, torch::optim::Optimizer&,
                                int step) {
  if (step % 5 != 3) return absl::OkStatus();
  double mean = 0;
  model->eval();
  {
    const torch::NoGradGuard no_grad;
    mean = model->forward(fsdp::testing::Rows(0, 3, 7)).mean().item<double>();
  }
  model->train();
  VisitOptions options;
  options.writeback = true;
  return model->ForEachFullParameter(
      [mean](const std::string&, const at::Tensor& value) {
        value.add_(mean / 16);
        return absl::OkStatus();
      },
      options);
}

std::vector<OffloadScenario> Scenarios() {
  const auto with_precision = [](void (*change)(MixedPrecision&)) {
    return [change](Options& options) {
      options.unit.precision.param_dtype = at::kBFloat16;
      change(options.unit.precision);
    };
  };
  const auto of_strategy = [](ShardingStrategy strategy) {
    return [strategy](Options& options) { options.unit.strategy = strategy; };
  };
  const auto full = of_strategy(ShardingStrategy::kFullShard);
  return {
      {"Disturbed1", 1, full, /*scaler=*/false, Disturb},
      {"Disturbed2", 2, full, /*scaler=*/false, Disturb},
      {"Disturbed3", 3, full, /*scaler=*/false, Disturb},
      {"ShardGradOp", 2, of_strategy(ShardingStrategy::kShardGradOp)},
      {"ShardOptimizer", 2, of_strategy(ShardingStrategy::kShardOptimizer)},
      {"NoShard", 2, of_strategy(ShardingStrategy::kNoShard)},
      {"Hybrid", 4, of_strategy(ShardingStrategy::kHybridShard)},
      {"LowPrecisionGradientsScaled", 2, with_precision([](MixedPrecision& p) {
         p.keep_low_precision_grads = true;
       }),
       /*scaler=*/true},
      {"FullPrecisionInEval", 2, with_precision([](MixedPrecision& p) {
         p.full_precision_in_eval = true;
       }),
       /*scaler=*/false, EvaluateNowAndThen},
      {"Regrouped", 2, full, /*scaler=*/false, Regroup},
  };
}

class OffloadMatrixTest
    : public ::testing::TestWithParam<std::tuple<OffloadScenario, Placing>> {};

TEST_P(OffloadMatrixTest, GivesTheBitsOfTheResidentRun) {
  const OffloadScenario& scenario = std::get<0>(GetParam());
  const Placing& placing = std::get<1>(GetParam());
  EXPECT_OK(RunAllRanks(
      scenario.world_size, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const OffloadRecord expected,
                              Train(scenario, world, OffloadOptions()));
        FSDP_ASSIGN_OR_RETURN(const OffloadRecord actual,
                              Train(scenario, world, placing.offload));
        return CheckSameBits(actual, expected);
      }));
}

INSTANTIATE_TEST_SUITE_P(All, OffloadMatrixTest,
                         ::testing::Combine(::testing::ValuesIn(Scenarios()),
                                            ::testing::ValuesIn(Placings())),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace fsdp::testing
