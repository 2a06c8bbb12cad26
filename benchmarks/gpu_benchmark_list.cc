#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <iostream>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/torch_status.h"
#include "benchmark/benchmark.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/measure.h"

ABSL_FLAG(std::string, device, "cuda", "Where to run: cuda, cuda:1, cpu.");
ABSL_FLAG(int, ranks, 1, "How many ranks this process plays by itself.");
ABSL_FLAG(int, turns, 20, "How often each contender runs.");
// These are for the GPT of most steps, by default of a billion parameters.
ABSL_FLAG(int, layers, 20, "Blocks of the model.");
ABSL_FLAG(int, dim, 2048, "Width of the model, a multiple of --heads.");
ABSL_FLAG(int, heads, 16, "Heads of the attention.");
ABSL_FLAG(int, seq, 1024, "Tokens of a row.");
ABSL_FLAG(int, batch, 4, "Rows of a step.");
ABSL_FLAG(int, vocab, 8192, "Different tokens.");
// These are for the GPT of full_finetune, by default of seven billion.
ABSL_FLAG(int, large_layers, 34, "Blocks of the large model.");
ABSL_FLAG(int, large_dim, 4096, "Width of the large model.");
ABSL_FLAG(int, large_heads, 32, "Heads of the large model's attention.");
ABSL_FLAG(int, large_batch, 16, "Rows of a backward of the large model.");
ABSL_FLAG(int, large_micro_batches, 2, "Backwards of the large model's step.");
ABSL_FLAG(int, large_turns, 4, "How often the large model steps at most.");
// These are for offload.
ABSL_FLAG(int, units, 8, "Units of offload's model, of two matrices each.");
ABSL_FLAG(int, matrix, 4096, "Rows and columns of such a matrix.");
ABSL_FLAG(int, rows, 4096,
          "Rows of a step in fp32; four times as many in bf16, which computes "
          "that much faster and more.");
namespace fsdp::benchmarks {
namespace {

constexpr int kManyRanks = 8;

const char* NameOf(at::ScalarType dtype) {
  return dtype == at::kFloat ? "fp32" : "bf16";
}

gpt::GptConfig Billion() {
  return {absl::GetFlag(FLAGS_vocab), absl::GetFlag(FLAGS_dim),
          absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_heads),
          absl::GetFlag(FLAGS_seq)};
}

void AddBenchmark(const std::string& name, int turns,
                  std::function<std::unique_ptr<TurnRun>()> make) {
  const auto run = [make = std::move(make)](benchmark::State& state) {
    const absl::Status status = TorchToStatus("this benchmark", [&] {
      const std::unique_ptr<TurnRun> turn_run = make();
      for (auto _ : state) state.SetIterationTime(turn_run->Turn());
      for (const auto& [figure, value] : turn_run->GetFigures()) {
        state.counters[figure] = value;
      }
    });
    if (!status.ok()) state.SkipWithError(status.ToString().c_str());
  };
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->Iterations(turns)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

// Their yardstick is plain LibTorch.
void AddTrainSteps(const Place& place, int turns,
                   const DeviceGraphMaker& graph) {
  const auto add = [turns](const std::string& name, const TrainStepCase& what,
                           const Place& on) {
    AddBenchmark(name, turns,
                 [what, on] { return MakeTrainStepRun(what, on); });
  };
  TrainStepCase what;
  what.model = Billion();
  what.batch = absl::GetFlag(FLAGS_batch);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for (const bool checkpointing : {false, true}) {
      what.dtype = dtype;
      what.checkpointing = checkpointing;
      add(absl::StrCat("train_step/", NameOf(dtype),
                       checkpointing ? "/checkpointing" : ""),
          what, place);
    }
  }
  Place many = place;
  if (many.ranks == 1) many.ranks = kManyRanks;
  what.dtype = at::kBFloat16;
  what.checkpointing = false;
  add(absl::StrCat("train_step/bf16/", many.ranks, "_ranks"), what, many);
  TrainStepCase small;
  small.model = {/*vocab=*/64, /*dim=*/64, /*layers=*/50, /*heads=*/4,
                 /*seq=*/16};
  small.batch = 1;
  add("host_cost", small, place);
  if (graph == nullptr) return;
  what.make_graph = small.make_graph = graph;
  add("train_step/bf16/captured", what, place);
  add("host_cost/captured", small, place);
}

OffloadOptions InHostMemory(bool all) {
  OffloadOptions offload;
  offload.optimizer = Tier::kCpu;
  if (all) {
    offload.parameters = offload.gradients = Tier::kCpu;
  }
  return offload;
}

// Their yardstick is PyTorch, where bf16 computes over fp32 shards, too.
void AddShardedSteps(const Place& place, int turns) {
  const auto add = [&place](const std::string& name,
                            const ShardedStepCase& what, int times) {
    AddBenchmark(name, times,
                 [what, place] { return MakeShardedStepRun(what, place); });
  };
  ShardedStepCase what;
  what.model = Billion();
  what.batch = absl::GetFlag(FLAGS_batch);
  add("sharded_step/bf16_over_fp32", what, turns);
  if (place.device.is_cpu()) return;  // nothing rests elsewhere
  what.offload = InHostMemory(/*all=*/true);
  add("sharded_step/bf16_over_fp32/all_on_host", what, turns);

  ShardedStepCase large;
  large.model = {absl::GetFlag(FLAGS_vocab), absl::GetFlag(FLAGS_large_dim),
                 absl::GetFlag(FLAGS_large_layers),
                 absl::GetFlag(FLAGS_large_heads), absl::GetFlag(FLAGS_seq)};
  large.batch = absl::GetFlag(FLAGS_large_batch);
  large.micro_batches = absl::GetFlag(FLAGS_large_micro_batches);
  large.recompute = true;
  large.clip = 1;
  const int large_turns = std::min(turns, absl::GetFlag(FLAGS_large_turns));
  for (const bool all : {false, true}) {
    large.offload = InHostMemory(all);
    add(absl::StrCat("full_finetune/", all ? "all" : "states", "_on_host"),
        large, large_turns);
  }
}

// Its yardstick is the same step with everything on the device.
void AddOffload(const Place& place, int turns) {
  if (place.device.is_cpu()) return;  // nothing rests elsewhere
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& [step_on, where] :
         {std::pair(StepOn::kDevice, "on_device"),
          std::pair(StepOn::kHost, "on_host")}) {
      OffloadCase what;
      what.units = absl::GetFlag(FLAGS_units);
      what.dim = absl::GetFlag(FLAGS_matrix);
      what.rows =
          absl::GetFlag(FLAGS_rows) * int64_t{dtype == at::kBFloat16 ? 4 : 1};
      what.dtype = dtype;
      what.step_on = step_on;
      AddBenchmark(absl::StrCat("offload/stepped_", where, "/", NameOf(dtype)),
                   turns,
                   [what, place] { return MakeOffloadRun(what, place); });
    }
  }
}

// Parses "cuda", "cuda:1" or "cpu". InvalidArgument: there is no such name.
// FailedPrecondition: this program or machine has no such device.
absl::StatusOr<c10::Device> ParseDevice(absl::string_view name) {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  if (!TorchToStatus("a device", [&] {
         device = c10::Device(std::string(name));
       }).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "there is no device '", name, "'; expected cuda, cuda:1 or cpu"));
  }
  if (device.is_cpu()) return device;
  if (!c10::impl::hasDeviceGuardImpl(device.type())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "running on ", name, ": this program has been linked ",
        "without it. Build with --config=cuda, or pass ", "--device=cpu"));
  }
  const int count = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  if (!device.has_index()) device.set_index(0);
  if (device.index() >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("running on ", name, ": this machine has ", count,
                     " of such devices; nvidia-smi shows GPUs with a driver"));
  }
  // Makes the allocator count.
  at::globalContext().lazyInitDevice(device.type());
  return device;
}

c10::DeviceAllocator* AllocatorOf(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  return dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
}

}  // namespace

Contender::Contender(c10::Device device, int warm_up,
                     const std::function<Repeated()>& make)
    : device_(device) {
  c10::DeviceAllocator* const allocator = AllocatorOf(device);
  counts_memory = allocator != nullptr;
  const auto held = [&]() -> c10::CachingAllocator::Stat {
    if (!counts_memory) return {};
    return allocator->getDeviceStats(device.index())
        .allocated_bytes[static_cast<size_t>(
            c10::CachingAllocator::StatType::AGGREGATE)];
  };
  const int64_t before = held().current;
  repeated_ = make();
  for (int i = 0; i < warm_up; ++i) {
    if (counts_memory) allocator->resetPeakStats(device.index());
    Run();
  }
  resident_bytes = held().current - before;
  peak_bytes = held().peak - before;
  for (auto* const seconds : {&host, &whole, &then}) seconds->clear();
}

void Contender::Run() {
  // The device has done all that it was given before.
  const auto seconds = [begin = absl::Now()] {
    return absl::ToDoubleSeconds(absl::Now() - begin);
  };
  losses.push_back(repeated_.run());
  host.push_back(seconds());
  Synchronize(device_);
  if (repeated_.then) {
    then.push_back(Seconds([this] {
      repeated_.then();
      Synchronize(device_);
    }));
  }
  whole.push_back(seconds());
}

void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module) {
  FSDP_CHECK(DeferredInit::IsActive());
  const c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor there =
        at::empty(parameter.sizes(), at::TensorOptions(device).dtype(dtype));
    // set_data() does the same, but not for every device.
    parameter.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
  }
  for (const std::shared_ptr<torch::nn::Module>& part : module.modules()) {
    if (auto* linear = part->as<torch::nn::Linear>()) {
      linear->reset_parameters();
    } else if (auto* embedding = part->as<torch::nn::Embedding>()) {
      embedding->reset_parameters();
    } else if (auto* norm = part->as<torch::nn::LayerNorm>()) {
      norm->reset_parameters();
    } else {
      FSDP_CHECK(part->parameters(/*recurse=*/false).empty());
    }
  }
}

int RunGpuBenchmarks(int argc, char** argv, const DeviceGraphMaker& graph) {
  benchmark::Initialize(&argc, argv);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  const absl::StatusOr<c10::Device> device =
      ParseDevice(absl::GetFlag(FLAGS_device));
  const int ranks = absl::GetFlag(FLAGS_ranks);
  const int turns = absl::GetFlag(FLAGS_turns);
  if (rest.size() > 1) {
    std::cerr << "unexpected argument '" << rest[1] << "'; see --helpfull\n";
    return 2;
  }
  if (ranks < 1 || turns < 1) {
    std::cerr << "--ranks and --turns: expected numbers from 1\n";
    return 2;
  }
  if (!device.ok()) {
    std::cerr << "--device: " << device.status().message() << "\n";
    return 2;
  }
  const Place place{*device, ranks};
  AddTrainSteps(place, turns, device->is_cpu() ? nullptr : graph);
  AddShardedSteps(place, turns);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    AddBenchmark(absl::StrCat("fused_adamw/", NameOf(dtype)), turns,
                 [=] { return MakeOptimizerRun(Billion(), dtype, place); });
  }
  AddOffload(place, turns);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace fsdp::benchmarks
