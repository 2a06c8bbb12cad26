// Measures the optimizer's step of a model whose states are on an SSD, in the
// directory that the environment variable OFFLOAD_DIRECTORY names (default
// /var/tmp): one rank, AdamW, units of 32 MiB. Counters: `GB/s` that the step
// reads and writes; `of_disk`, that over what the disk gives to a program that
// only reads and writes as much of each, in turns with the steps, median;
// `of_resident`, the time of the same step in memory over this one's;
// `MB_in_memory`, buffers and what rests there.
//   ./bazelw run -c opt //benchmarks:offload_benchmark
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/status_error.h"
#include "benchmark/benchmark.h"
#include "benchmarks/plain_file.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_space.h"
#include "offload/page_memory.h"

namespace fsdp {
namespace {

constexpr int64_t kDim = 2048;
constexpr int kUnits = 4;
constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr int kDepth = 16;

class PairImpl : public torch::nn::Module {
 public:
  PairImpl() {
    const auto plain = torch::nn::LinearOptions(kDim, kDim).bias(false);
    first = register_module("first", torch::nn::Linear(plain));
    second = register_module("second", torch::nn::Linear(plain));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + second(first(x).tanh());
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

class PairsImpl : public torch::nn::Module {
 public:
  PairsImpl() : pairs(register_module("pairs", torch::nn::ModuleList())) {
    for (int i = 0; i < kUnits; ++i) {
      pairs->push_back(std::make_shared<PairImpl>());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& pair : *pairs) y = Forward(*pair->as<PairImpl>(), y);
    return y;
  }
  torch::nn::ModuleList pairs;
};

std::string Directory() {
  const char* const directory = std::getenv("OFFLOAD_DIRECTORY");
  return directory != nullptr ? directory : "/var/tmp";
}

// Is a model with its optimizer, whose step is timed.
class Training {
 public:
  explicit Training(const OffloadOptions& offload) {
    Options options;
    options.wrap_policy = WrapModules<PairImpl>();
    options.offload = offload;
    auto group = ValueOrThrow(comm::CreateLocalGroup(1));
    model_ = std::make_unique<FullyShardedDataParallel<PairsImpl>>(ValueOrThrow(
        FullyShard(std::make_shared<PairsImpl>(),
                   std::shared_ptr<comm::Communicator>(std::move(group[0])),
                   options)));
    optimizer_ = std::make_unique<FusedAdamW>(model().Parameters(),
                                              torch::optim::AdamWOptions(1e-4));
  }

  double StepSeconds() {
    const at::Tensor x = at::full({1, kDim}, 0.5);
    optimizer_->zero_grad();
    ThrowIfError(model().Backward((*model_)->forward(x).square().mean()));
    const absl::Time begin = absl::Now();
    optimizer_->step();
    return absl::ToDoubleSeconds(absl::Now() - begin);
  }

  const OffloadSpace* space() { return model().sharded_model().offload(); }

 private:
  ShardedModuleBase& model() { return **model_; }

  std::unique_ptr<FullyShardedDataParallel<PairsImpl>> model_;
  std::unique_ptr<FusedAdamW> optimizer_;
};

// Bytes of all stores so far.
struct Moved {
  int64_t read = 0;
  int64_t written = 0;
};

Moved MovedBy(const OffloadSpace& space) {
  Moved moved;
  for (const offload::StoreStats& store : space.stats().stores) {
    moved.read += store.reads.bytes;
    moved.written += store.writes.bytes;
  }
  return moved;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Rounds down to whole blocks.
int64_t InBlocks(int64_t bytes) { return bytes / kBlockBytes * kBlockBytes; }

void BM_Step(benchmark::State& state, OffloadOptions offload) {
  offload.directory = Directory();
  offload.block_bytes = kBlockBytes;
  offload.queue_depth = kDepth;
  Training resident{OffloadOptions()};
  Training training(offload);
  // A step moves at most so much.
  constexpr int64_t kPlainBytes = int64_t{1} << 30;
  PlainFile plain(Directory(), kPlainBytes, kBlockBytes, kDepth);
  auto memory = offload::PageMemory::Allocate(offload::PageAllocator::System(),
                                              kPlainBytes);
  FSDP_CHECK(memory.ok());
  std::memset(memory->data(), 1, kPlainBytes);
  plain.Move(0, kPlainBytes, memory->data());
  for (int i = 0; i < 2; ++i) {
    resident.StepSeconds();
    training.StepSeconds();
  }
  std::vector<double> of_disk;
  std::vector<double> of_resident;
  double seconds = 0;
  int64_t bytes = 0;
  for (auto _ : state) {
    const Moved before = MovedBy(*training.space());
    const double step = training.StepSeconds();
    const Moved after = MovedBy(*training.space());
    const int64_t read = after.read - before.read;
    const int64_t written = after.written - before.written;
    const double disk =
        plain.Move(InBlocks(read), InBlocks(written), memory->data());
    state.SetIterationTime(step);
    of_disk.push_back(disk / step);
    of_resident.push_back(resident.StepSeconds() / step);
    seconds += step;
    bytes += read + written;
  }
  state.counters["of_disk"] = Median(of_disk);
  state.counters["of_resident"] = Median(of_resident);
  state.counters["GB/s"] = static_cast<double>(bytes) * 1e-9 / seconds;
  state.counters["MB_in_memory"] =
      static_cast<double>(training.space()->plan().device_bytes()) * 1e-6;
}

OffloadOptions ToSsd(Tier parameters, Tier gradients, bool rollback) {
  OffloadOptions offload;
  offload.parameters = parameters;
  offload.gradients = gradients;
  offload.optimizer = Tier::kSsd;
  offload.rollback = rollback;
  return offload;
}

BENCHMARK_CAPTURE(BM_Step, all, ToSsd(Tier::kSsd, Tier::kSsd, true))
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_Step, states, ToSsd(Tier::kDevice, Tier::kDevice, true))
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_Step, states_without_rollback,
                  ToSsd(Tier::kDevice, Tier::kDevice, false))
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fsdp
