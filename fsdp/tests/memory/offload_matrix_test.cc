// Wherever parameters, gradients and optimizer states rest, training gives the
// bits that it gives with all of them in memory.

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cstdlib>

#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/trained_values.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::testing::Fault;

// --- A training whose results are recorded exactly --------------------------

using ToyModel = FullyShardedDataParallel<NetImpl>;

// A training, apart from where things rest.
struct OffloadScenario {
  std::string name;
  int world_size = 2;
  int replicas = 1;  // rows of the mesh
  int steps = 20;
  int backwards = 1;  // per step
  bool no_sync = false;
  bool step_in_backward = false;
  bool sgd = false;     // else AdamW
  double max_norm = 0;  // 0 for no clipping
  bool scaler = false;  // gradients are scaled
  bool zero_to_none = true;
  std::function<void(Options&)> configure = [](Options&) {};
  // Called before each step.
  std::function<absl::Status(ToyModel&, torch::optim::Optimizer&, int step)>
      before_step = [](ToyModel&, torch::optim::Optimizer&, int) {
        return absl::OkStatus();
      };
};

struct OffloadRecord {
  std::vector<double> losses;  // of this rank
  std::vector<double> norms;
  Values tensors;  // parameters and states, whole
};

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;
constexpr int64_t kRows = 3;  // of a rank and backward

class Run {
 public:
  Run(const OffloadScenario& scenario, ToyModel model)
      : scenario_(scenario), model_(std::move(model)) {
    if (scenario.sgd) {
      TakeOptimizer<FusedSGD>(
          torch::optim::SGDOptions(0.05).momentum(0.9).dampening(0.1));
    } else {
      TakeOptimizer<FusedAdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true));
    }
  }

  absl::StatusOr<OffloadRecord> Go() {
    if (scenario_.step_in_backward) {
      FSDP_RETURN_IF_ERROR(model_->StepInBackward(step_unit_));
    }
    if (scenario_.scaler) {
      GradScalerOptions options;
      options.init_scale = 1024;
      options.growth_interval = 7;
      FSDP_ASSIGN_OR_RETURN(
          scaler_, ShardedGradScaler::Create(model_->communicator(), options));
    }
    for (int step = 0; step < scenario_.steps; ++step) {
      FSDP_RETURN_IF_ERROR(scenario_.before_step(model_, *optimizer_, step));
      FSDP_RETURN_IF_ERROR(Step(step));
    }
    FSDP_RETURN_IF_ERROR(Finish());
    return record_;
  }

 private:
  template <typename Optimizer, typename Options>
  void TakeOptimizer(const Options& options) {
    auto optimizer = std::make_unique<Optimizer>(model_->Parameters(), options);
    step_unit_ = [own = optimizer.get()](absl::Span<const TensorRange> unit) {
      return own->StepUnit(unit);
    };
    optimizer_ = std::move(optimizer);
  }

  absl::Status Step(int step) {
    comm::Communicator& world = model_->communicator();
    model_->zero_grad(scenario_.zero_to_none);
    for (int i = 0; i < scenario_.backwards; ++i) {
      std::optional<NoSyncScope> no_sync;
      if (scenario_.no_sync && i + 1 < scenario_.backwards) {
        no_sync.emplace(model_->NoSync());
      }
      const int64_t part =
          (step * scenario_.backwards + i) * world.world_size() + world.rank();
      const at::Tensor x = Rows(part * kRows, kRows, kDim);
      at::Tensor loss = Loss(model_->forward(x), x) / scenario_.backwards;
      record_.losses.push_back(loss.item<double>());
      if (scaler_) loss = scaler_->Scale(loss);
      FSDP_RETURN_IF_ERROR(model_->Backward(loss));
    }
    return Update();
  }

  absl::Status Update() {
    if (scaler_) {
      FSDP_RETURN_IF_ERROR(scaler_->Unscale(model_->Ranges()).status());
    }
    if (scenario_.max_norm > 0) {
      FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                            model_->ClipGradNorm(scenario_.max_norm));
      record_.norms.push_back(norm.item<double>());
    }
    if (scaler_) {
      FSDP_RETURN_IF_ERROR(
          scaler_->Step(*optimizer_, model_->Ranges()).status());
      return scaler_->Update();
    }
    if (!scenario_.step_in_backward) optimizer_->step();
    return absl::OkStatus();
  }

  absl::Status Finish() {
    FSDP_ASSIGN_OR_RETURN(record_.tensors, ValuesOf(*model_, *optimizer_));
    FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                          model_->GatherOptimizerState(*optimizer_));
    for (const auto& [name, number] : states.numbers) {
      record_.norms.push_back(static_cast<double>(number));
    }
    return CheckTraffic();
  }

  // If nothing has left memory, nothing was compared.
  absl::Status CheckTraffic() const {
    const OffloadSpace* const space = model_->sharded_model().offload();
    if (space == nullptr) return absl::OkStatus();
    for (int kind = 0; kind < kNumRestingKinds; ++kind) {
      const bool moves = space->plan().bytes[kind].ssd > 0;
      EXPECT_EQ(moves, (space->stats().stores[kind].writes.bytes > 0))
          << "another traffic than planned of kind " << kind;
    }
    return absl::OkStatus();
  }

  const OffloadScenario& scenario_;
  ToyModel model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  ShardedModel::UnitStep step_unit_;
  std::optional<ShardedGradScaler> scaler_;
  OffloadRecord record_;
};

// Trains on this rank; all ranks must do the same.
absl::StatusOr<OffloadRecord> Train(const OffloadScenario& scenario,
                                    const comm::Mesh& mesh,
                                    const OffloadOptions& offload) {
  Options options = BlockUnits();
  scenario.configure(options);
  options.offload = offload;
  options.offload.optimizer_state = scenario.sgd ? 1 : 3;
  FSDP_ASSIGN_OR_RETURN(ToyModel model,
                        FullyShard(MakeNet(kDim, kBlocks), mesh, options));
  return Run(scenario, std::move(model)).Go();
}

// Returns Internal with the first difference in any bit.
absl::Status CheckSameBits(const OffloadRecord& actual,
                           const OffloadRecord& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.norms, expected.norms);
  return CheckEqual(actual.tensors, expected.tensors);
}

// --- Where things rest -------------------------------------------------------

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

// --- What happens ------------------------------------------------------------

// Replaces values in every possible way.
absl::Status Disturb(ToyModel& model, torch::optim::Optimizer& optimizer,
                     int step) {
  if (step == 4) {
    FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
    FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                          model->GatherOptimizerState(optimizer));
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(dict));
    FSDP_RETURN_IF_ERROR(model->LoadOptimizerState(optimizer, states));
  }
  if (step == 8) {
    SummonOptions options;
    options.writeback = true;
    FSDP_ASSIGN_OR_RETURN(FullParamsScope scope,
                          model->SummonFullParams(options));
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.module()->parameters()) {
      parameter.mul_(0.75);
    }
    FSDP_RETURN_IF_ERROR(scope.Close());
  }
  if (step == 12) {
    VisitOptions options;
    options.writeback = true;
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [](const std::string&, const at::Tensor& value) {
          value.add_(0.01);
          return absl::OkStatus();
        },
        options));
    FSDP_ASSIGN_OR_RETURN(const ShardedStateDict sharded,
                          model->MakeShardedStateDict());
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status FreezeAndUnfreeze(ToyModel& model, torch::optim::Optimizer&,
                               int step) {
  if (step % 6 == 2) {
    FSDP_RETURN_IF_ERROR(model->SetTrainable("blocks.1.fc.weight", false));
  }
  if (step % 6 == 5) {
    FSDP_RETURN_IF_ERROR(model->SetTrainable("blocks.1.fc.weight", true));
  }
  return absl::OkStatus();
}

// Gives a parameter a group of its own with another learning rate.
absl::Status Regroup(ToyModel&, torch::optim::Optimizer& optimizer, int step) {
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
absl::Status EvaluateNowAndThen(ToyModel& model, torch::optim::Optimizer&,
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

OffloadScenario Named(std::string name) {
  OffloadScenario scenario;
  scenario.name = std::move(name);
  return scenario;
}

OffloadScenario OfStrategy(std::string name, ShardingStrategy strategy) {
  OffloadScenario scenario = Named(std::move(name));
  scenario.configure = [strategy](Options& options) {
    options.unit.strategy = strategy;
  };
  return scenario;
}

std::vector<OffloadScenario> Scenarios() {
  std::vector<OffloadScenario> scenarios;
  const auto add = [&](OffloadScenario scenario) -> OffloadScenario& {
    return scenarios.emplace_back(std::move(scenario));
  };
  for (int world_size : {1, 2, 3}) {
    add(Named(absl::StrCat("Plain", world_size))).world_size = world_size;
  }
  OffloadScenario& accumulating = add(Named("Accumulating"));
  accumulating.backwards = 3;
  accumulating.max_norm = 0.5;
  OffloadScenario& no_sync = add(Named("NoSync"));
  no_sync.backwards = 3;
  no_sync.no_sync = true;
  OffloadScenario& clipped = add(Named("ClippedSgd"));
  clipped.sgd = true;
  clipped.max_norm = 0.1;
  clipped.zero_to_none = false;
  OffloadScenario& mixed = add(Named("MixedPrecision"));
  mixed.max_norm = 1;
  mixed.configure = [](Options& options) {
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.reduce_dtype = at::kFloat;
  };
  OffloadScenario& low = add(Named("LowPrecisionGradientsScaled"));
  low.scaler = true;
  low.configure = [](Options& options) {
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.keep_low_precision_grads = true;
  };
  OffloadScenario& in_eval = add(Named("FullPrecisionInEval"));
  in_eval.before_step = EvaluateNowAndThen;
  in_eval.configure = [](Options& options) {
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.full_precision_in_eval = true;
  };
  add(Named("Frozen")).before_step = FreezeAndUnfreeze;
  add(Named("Disturbed")).before_step = Disturb;
  add(Named("Regrouped")).before_step = Regroup;
  OffloadScenario& in_backward = add(Named("StepInBackward"));
  in_backward.step_in_backward = true;
  add(OfStrategy("ShardGradOp", ShardingStrategy::kShardGradOp));
  add(OfStrategy("ShardOptimizer", ShardingStrategy::kShardOptimizer));
  add(OfStrategy("NoShard", ShardingStrategy::kNoShard));
  OffloadScenario& hybrid =
      add(OfStrategy("Hybrid", ShardingStrategy::kHybridShard));
  hybrid.world_size = 4;
  hybrid.replicas = 2;
  hybrid.max_norm = 0.5;
  return scenarios;
}

class OffloadMatrixTest
    : public ::testing::TestWithParam<std::tuple<OffloadScenario, Placing>> {};

TEST_P(OffloadMatrixTest, GivesTheBitsOfTheResidentRun) {
  const OffloadScenario& scenario = std::get<0>(GetParam());
  const Placing& placing = std::get<1>(GetParam());
  EXPECT_OK(RunAllRanks(
      scenario.world_size, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            const Mesh mesh,
            Mesh::Create(Unowned(world),
                         {{"replicate", scenario.replicas}, {"shard", -1}}));
        FSDP_ASSIGN_OR_RETURN(const OffloadRecord expected,
                              Train(scenario, mesh, OffloadOptions()));
        FSDP_ASSIGN_OR_RETURN(const OffloadRecord actual,
                              Train(scenario, mesh, placing.offload));
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
