// Wherever parameters, gradients and optimizer states rest, training gives the
// bits that it gives with all of them in memory.

#include <cstdlib>

#include "fsdp/options/offload_options.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/offload_run.h"
#include "fsdp/testing/sharded_test.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::testing::Fault;

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
