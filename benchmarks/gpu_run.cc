#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <cmath>
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
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "benchmark/benchmark.h"
#include "benchmarks/gpu_benchmarks.h"
#include "comm/testing/loopback_communicator.h"

ABSL_FLAG(std::string, device, "cuda", "Where to run: cuda, cuda:1, cpu.");
ABSL_FLAG(int, ranks, 1, "How many ranks this process plays by itself.");
ABSL_FLAG(int, turns, 20, "How often each contender runs.");

namespace fsdp::benchmarks {
namespace {

c10::DeviceAllocator* AllocatorOf(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  return dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
}

void RunTurns(benchmark::State& state, const MakeRun& make) {
  const std::unique_ptr<TurnRun> run = make();
  for (auto _ : state) state.SetIterationTime(run->Turn());
  for (const auto& [name, value] : run->GetFigures()) {
    state.counters[name] = value;
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

}  // namespace

std::shared_ptr<comm::Communicator> LoopbackGroup(const Place& place) {
  comm::LoopbackOptions options;
  options.place = {/*rank=*/0, place.ranks};
  options.device = place.device;
  options.prefers_scaled_inputs = true;  // as NCCL does
  return ValueOrThrow(comm::CreateLoopback(options));
}

bool DeviceMemory::known() const { return AllocatorOf(device_) != nullptr; }

c10::CachingAllocator::Stat DeviceMemory::bytes_held() const {
  c10::DeviceAllocator* const allocator = AllocatorOf(device_);
  if (allocator == nullptr) return {};
  return allocator->getDeviceStats(device_.index())
      .allocated_bytes[static_cast<size_t>(
          c10::CachingAllocator::StatType::AGGREGATE)];
}

void DeviceMemory::ResetPeak() const {
  c10::DeviceAllocator* const allocator = AllocatorOf(device_);
  if (allocator != nullptr) allocator->resetPeakStats(device_.index());
}

CallTime Time(c10::Device device, const std::function<void()>& call) {
  Synchronize(device);
  const absl::Time begin = absl::Now();
  call();
  const absl::Time given = absl::Now();
  Synchronize(device);
  return {absl::ToDoubleSeconds(given - begin),
          absl::ToDoubleSeconds(absl::Now() - begin)};
}

double LossDifference(absl::string_view name,
                      const std::vector<at::Tensor>& losses,
                      absl::string_view other_name,
                      const std::vector<at::Tensor>& other,
                      at::ScalarType dtype) {
  const double tolerance = dtype == at::kFloat ? 1e-4 : 5e-2;
  double largest = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto mine = losses[i].item<double>();
    const auto theirs = other[i].item<double>();
    const double difference = std::abs(mine - theirs) / std::abs(theirs);
    if (!(difference <= tolerance)) {
      throw StatusError(absl::InternalError(
          absl::StrCat("step ", i, ": the ", name, " model's loss is ", mine,
                       ", the ", other_name, " model's ", theirs,
                       ". Steps of different trainings are not compared")));
    }
    largest = std::max(largest, difference);
  }
  return largest;
}

CountingRows::CountingRows(const gpt::GptConfig& model, int64_t batch,
                           c10::Device device) {
  const at::Tensor counts = at::arange(model.seq + 1, at::kLong);
  const at::Tensor starts = at::arange(batch, at::kLong) * 31;
  const at::Tensor rows =
      (starts.unsqueeze(1) + counts.unsqueeze(0)).remainder(model.vocab);
  tokens = rows.narrow(1, 0, model.seq).contiguous().to(device);
  targets = rows.narrow(1, 1, model.seq).contiguous().to(device);
}

at::Tensor LossOf(const at::Tensor& logits, const CountingRows& rows) {
  return gpt::NextTokenLoss(logits.to(at::kFloat), rows.targets);
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

void AddBenchmark(const std::string& name, int turns, MakeRun make) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [make = std::move(make)](benchmark::State& state) {
        const absl::Status status =
            TorchToStatus("this benchmark", [&] { RunTurns(state, make); });
        if (!status.ok()) state.SkipWithError(status.ToString().c_str());
      })
      ->Iterations(turns)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

int RunBenchmarks(int argc, char** argv,
                  const std::function<void(const Place&, int turns)>& add) {
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
  add(Place{*device, ranks}, turns);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace fsdp::benchmarks
