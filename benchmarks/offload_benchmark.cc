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
#include <torch/optim/adamw.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/pairs.h"
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

// Is a model with its optimizer, whose step is timed.
class Training {
 public:
  explicit Training(const OffloadOptions& offload) {
    Options options;
    options.wrap_policy = WrapModules<PairImpl>();
    options.offload = offload;
    auto group = ValueOrThrow(comm::CreateLocalGroup(1));
    model_ = std::make_unique<FullyShardedDataParallel<PairsImpl>>(ValueOrThrow(
        FullyShard(std::make_shared<PairsImpl>(kUnits, kDim),
                   std::shared_ptr<comm::Communicator>(std::move(group[0])),
                   options)));
    optimizer_ = std::make_unique<FusedAdamW>(model().Parameters(),
                                              torch::optim::AdamWOptions(1e-4));
  }

  double StepSeconds() {
    const at::Tensor x = at::full({1, kDim}, 0.5);
    optimizer_->zero_grad();
    ThrowIfError(model().Backward((*model_)->forward(x).square().mean()));
    return Seconds([this] { optimizer_->step(); });
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

// Rounds down to whole blocks.
int64_t InBlocks(int64_t bytes) { return bytes / kBlockBytes * kBlockBytes; }

void BM_Step(benchmark::State& state, OffloadOptions offload) {
  offload.directory = DirectoryIn("OFFLOAD_DIRECTORY");
  offload.block_bytes = kBlockBytes;
  offload.queue_depth = kDepth;
  Training resident{OffloadOptions()};
  Training training(offload);
  // A step moves at most so much.
  constexpr int64_t kPlainBytes = int64_t{1} << 30;
  PlainFile plain(DirectoryIn("OFFLOAD_DIRECTORY"), kPlainBytes, kBlockBytes,
                  kDepth);
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

void InMilliseconds(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(BM_Step, all, ToSsd(Tier::kSsd, Tier::kSsd, true))
    ->Apply(InMilliseconds);
BENCHMARK_CAPTURE(BM_Step, states, ToSsd(Tier::kDevice, Tier::kDevice, true))
    ->Apply(InMilliseconds);
BENCHMARK_CAPTURE(BM_Step, states_without_rollback,
                  ToSsd(Tier::kDevice, Tier::kDevice, false))
    ->Apply(InMilliseconds);

}  // namespace
}  // namespace fsdp
