#include "fsdp/testing/device_programs.h"

#include <torch/optim/adamw.h>

#include "comm/testing/loopback_communicator.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/state/whole_model.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 6;
constexpr int kBlocks = 3;
constexpr int kSteps = 3;

DeviceProgram With(std::string name, std::function<void(Options&)> configure) {
  DeviceProgram program;
  program.name = std::move(name);
  program.configure = std::move(configure);
  return program;
}

void StatesInStores(Options& options) {
  OffloadOptions& offload = options.offload;
  offload.optimizer = Tier::kSsd;
  offload.make_store = [](RestingKind /*kind*/, int64_t capacity) {
    return offload::testing::RollingHostStore(capacity);
  };
}

void AllInStores(Options& options) {
  StatesInStores(options);
  options.offload.parameters = options.offload.gradients = Tier::kSsd;
}

// With this epsilon, an update does not depend on the last bits of tiny
// numbers.
torch::optim::AdamWOptions Smooth() {
  return torch::optim::AdamWOptions(1e-2).eps(1e-3);
}

absl::StatusOr<std::shared_ptr<Communicator>> World(const TrainingDevice& place,
                                                    int world_size) {
  return place.world ? place.world(world_size)
                     : OneOf(world_size, place.device);
}

template <typename Model>
absl::StatusOr<Values> ValuesOf(const Model& model) {
  Values values;
  for (const TensorRange& named : model->Ranges()) {
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(named.values, Use::kRead));
    values[named.name] = named.values.detach().cpu().clone();
  }
  return values;
}

int64_t Allocations(const MemoryStats& stats) {
  return stats.parameters.allocations + stats.gradients.allocations;
}

// Has no sums and functions, whose last bits may depend on an element's place.
class PointsImpl : public torch::nn::Module {
 public:
  PointsImpl() {
    for (int i = 0; i < 2; ++i) {
      factors_[i] = register_parameter(absl::StrCat("factor", i),
                                       Rows(i, kDim, kDim).clone());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return x * factors_[0] * factors_[1] + factors_[1];
  }

 private:
  at::Tensor factors_[2];
};

using Step = decltype(DeviceProgram::step);

DeviceProgram Stepping(std::string name, Step step) {
  DeviceProgram program;
  program.name = std::move(name);
  program.step = std::move(step);
  return program;
}

DeviceProgram OfStrategy(std::string name, ShardingStrategy strategy) {
  return With(std::move(name), [strategy](Options& options) {
    options.unit.strategy = strategy;
  });
}

DeviceProgram Coarse(std::string name,
                     std::function<void(Options&)> configure) {
  DeviceProgram program = With(std::move(name), std::move(configure));
  program.is_coarse = true;
  return program;
}

std::function<void(Options&)> Quantized(bool gather, bool reduce) {
  return [gather, reduce](Options& options) {
    options.quantize.gather = gather;
    options.quantize.reduce = reduce;
    options.quantize.block = 8;
  };
}

void InBFloat16ReducedInFloat(Options& options) {
  options.unit.precision.param_dtype = at::kBFloat16;
  options.unit.precision.reduce_dtype = at::kFloat;
}

std::function<void(Options&)> AllOnTheCpu(StepOn step_on) {
  return [step_on](Options& options) {
    OffloadOptions& offload = options.offload;
    offload.parameters = offload.gradients = offload.optimizer = Tier::kCpu;
    offload.step_on = step_on;
  };
}

absl::Status AccumulatedStep(DeviceProgram::Model& model,
                             const std::function<at::Tensor()>& loss) {
  FSDP_RETURN_IF_ERROR(model->Backward(loss()));
  return model->Backward(loss());
}

absl::Status NoSyncStep(DeviceProgram::Model& model,
                        const std::function<at::Tensor()>& loss) {
  {
    const auto no_sync = model->NoSync();
    FSDP_RETURN_IF_ERROR(model->Backward(loss()));
  }
  return model->Backward(loss());
}

absl::Status SummonedStep(DeviceProgram::Model& model,
                          const std::function<at::Tensor()>& loss) {
  {
    FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams());
    const c10::NoGradGuard no_grad;
    for (at::Tensor& p : model.module()->parameters()) p.mul_(0.5);
    FSDP_RETURN_IF_ERROR(full.Close());
  }
  return model->Backward(loss());
}

absl::Status AskedForThenWrittenStep(DeviceProgram::Model& model,
                                     const std::function<at::Tensor()>& loss) {
  {
    const c10::NoGradGuard no_grad;
    FSDP_RETURN_IF_ERROR(Unshard(*model.module()->blocks[1]).status());
    for (const TensorRange& named : model->Ranges()) named.values.mul_(2);
    const at::Tensor looked = loss().tanh() * 1e-3;
    for (const TensorRange& named : model->Ranges()) {
      named.values.mul_(0.5).add_(looked);
    }
  }
  return model->Backward(loss());
}

}  // namespace

void PrintTo(const DeviceProgram& program, std::ostream* out) {
  *out << program.name;
}

absl::StatusOr<std::shared_ptr<Communicator>> OneOf(int world_size,
                                                    c10::Device device) {
  comm::LoopbackOptions loopback;
  loopback.place = {world_size / 2, world_size};
  loopback.device = device;
  return comm::CreateLoopback(loopback);
}

std::string NameOfCase(const std::tuple<DeviceProgram, int>& param) {
  const auto& [program, world_size] = param;
  return absl::StrCat(program.name, "Of", world_size);
}

std::vector<DeviceProgram> DevicePrograms() {
  std::vector<DeviceProgram> programs = {
      With("FullShard", [](Options&) {}),
      With("OneUnit", [](Options& options) { options.wrap_policy = nullptr; }),
      OfStrategy("ShardGradOp", ShardingStrategy::kShardGradOp),
      OfStrategy("NoShard", ShardingStrategy::kNoShard),
      Coarse("BFloat16",
             [](Options& options) {
               options.unit.precision.param_dtype = at::kBFloat16;
             }),
      Coarse("BFloat16ReducedInFloat", InBFloat16ReducedInFloat),
      Coarse("QuantizedSums", Quantized(/*gather=*/false, /*reduce=*/true)),
      Coarse("QuantizedGathers", Quantized(/*gather=*/true, /*reduce=*/false)),
      Coarse("QuantizedInBFloat16",
             [](Options& options) {
               options.quantize.gather = options.quantize.reduce = true;
               InBFloat16ReducedInFloat(options);
             }),
      With("WithoutPrefetch",
           [](Options& options) {
             options.prefetch.forward = options.prefetch.backward = false;
           }),
      With("AllOnTheCpu", AllOnTheCpu(OffloadOptions().step_on)),
      With("AllOnTheCpuSteppedThere", AllOnTheCpu(StepOn::kHost)),
      With("AllInStoresSteppedOnTheCpu",
           [](Options& options) {
             AllInStores(options);
             options.offload.step_on = StepOn::kHost;
           }),
      With("GradientsOnTheDevice",
           [](Options& options) {
             options.offload.parameters = Tier::kCpu;
             options.offload.optimizer = Tier::kCpu;
           }),
      With("StatesOnTheCpu",
           [](Options& options) { options.offload.optimizer = Tier::kCpu; }),
      With("StatesInStores", StatesInStores),
      With("AllInStores", AllInStores),
      Stepping("Accumulated", AccumulatedStep),
      Stepping("NoSync", NoSyncStep),
      Stepping("Summoned", SummonedStep),
      Stepping("AskedForThenWritten", AskedForThenWrittenStep),
      With("Clipped", [](Options&) {}),
      With("StepInBackward", [](Options&) {}),
  };
  for (DeviceProgram& program : programs) {
    program.looks_at_values = program.name == "Summoned";
    program.clips = program.name == "Clipped";
    program.steps_in_backward = program.name == "StepInBackward";
  }
  return programs;
}

absl::StatusOr<Values> TrainOnDevice(const DeviceProgram& program,
                                     int world_size,
                                     const TrainingDevice& place) {
  FSDP_ASSIGN_OR_RETURN(const auto world, World(place, world_size));
  const std::shared_ptr<NetImpl> net = MakeNet(kDim, kBlocks);
  place.move(*net);
  Options options = BlockUnits();
  program.configure(options);
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, world, options));
  FusedAdamW optimizer(model->Parameters(), Smooth());
  if (program.steps_in_backward) {
    FSDP_RETURN_IF_ERROR(
        model->StepInBackward([&](absl::Span<const TensorRange> unit) {
          return optimizer.StepUnit(unit);
        }));
  }
  std::vector<at::Tensor> batches;
  batches.reserve(kSteps);
  for (int64_t i = 0; i < kSteps; ++i) {
    batches.push_back(Rows(3 * i, 3, kDim).to(place.device));
  }
  int64_t allocations = 0;
  for (int i = 0; i < kSteps; ++i) {
    if (i == 1) {
      allocations = Allocations(model->memory_stats());
      place.begin();
    }
    const at::Tensor& x = batches[i];
    FSDP_RETURN_IF_ERROR(
        program.step(model, [&] { return Loss(model->forward(x), x); }));
    if (program.clips) {
      FSDP_RETURN_IF_ERROR(model->ClipGradNorm(/*max_norm=*/0.1).status());
    }
    if (!program.steps_in_backward) optimizer.step();
    optimizer.zero_grad();
  }
  place.end();
  const int64_t since = Allocations(model->memory_stats()) - allocations;
  if (since > 0) {
    return absl::InternalError(absl::StrCat(
        since, " buffers were allocated after the first step, which allocated ",
        allocations));
  }
  return ValuesOf(model);
}

absl::StatusOr<std::vector<std::string>> DifferencesFromStepsOnTheCpu(
    const TrainingDevice& place) {
  FSDP_ASSIGN_OR_RETURN(const auto world, World(place, 1));
  Options options;
  AllOnTheCpu(StepOn::kHost)(options);
  const auto points = std::make_shared<PointsImpl>();
  place.move(*points);
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(points, world, options));
  FusedAdamW optimizer(model->Parameters(), Smooth());

  PointsImpl oracle;
  place.move(oracle);
  std::map<std::string, at::Tensor> on_cpu;
  std::vector<at::Tensor> stepped;
  for (const auto& item : oracle.named_parameters()) {
    const at::Tensor copy =
        item.value().detach().cpu().clone().requires_grad_();
    on_cpu[item.key()] = copy;
    stepped.push_back(copy);
  }
  FusedAdamW cpu_optimizer(stepped, Smooth());

  for (int i = 0; i < kSteps; ++i) {
    const at::Tensor x = Rows(i, kDim, kDim).to(place.device);
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    optimizer.step();
    optimizer.zero_grad();
    oracle.forward(x).sum().backward();
    for (auto& item : oracle.named_parameters()) {
      on_cpu[item.key()].mutable_grad() = item.value().grad().cpu();
    }
    cpu_optimizer.step();
    const c10::NoGradGuard no_grad;
    for (auto& item : oracle.named_parameters()) {
      item.value().copy_(on_cpu[item.key()]);
      item.value().mutable_grad() = at::Tensor();
    }
  }
  FSDP_ASSIGN_OR_RETURN(const Values values, ValuesOf(model));
  std::vector<std::string> different;
  for (const auto& [name, value] : on_cpu) {
    if (!at::equal(values.at(name), value.flatten())) different.push_back(name);
  }
  return different;
}

}  // namespace fsdp::testing
