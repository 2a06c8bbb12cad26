// Saves and loads a model of 2 GB on two ranks, in the folder that the
// environment variable CHECKPOINT_DIRECTORY names (default /var/tmp), with
// CRC32C and fsync. What was written is dropped from the page cache before it
// is read. Counters:
// - `GB/s`;
// - `of_plain`: the speed over that of a program that only writes, or reads, a
//   file in pieces of 8 MiB past the page cache, three at a time, in the same
//   run, with fdatasync;
// - `blocked_ms`: how long SaveAsync() keeps the training waiting the first
//   time, when its memory is new; `later_ms`: how long after that; `copy_ms`:
//   how long a copy of as many bytes takes;
// - `alone_ms`: one of kSteps steps of the model, one core for each rank;
//   `beside_ms`: the same while a save is under way that has begun before,
//   without the time of SaveAsync().
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/chain.h"
#include "benchmarks/measure.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "offload/page_memory.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int64_t kDim = 4096;
constexpr int kLayers = 32;
constexpr int64_t kBytes = kLayers * kDim * kDim * 4;
constexpr int64_t kPiece = int64_t{8} << 20;
constexpr int kInFlight = 3;
constexpr int kSteps = 6;
constexpr int64_t kRows = 32;

std::string Directory() {
  return DirectoryIn("CHECKPOINT_DIRECTORY") + "/checkpoint_benchmark";
}

double PlainSeconds(bool writes) {
  const std::string path = Directory() + ".plain";
  auto& files = RealFileSystem();
  const auto caching = Caching::kDirect;
  const auto file = ValueOrThrow(writes ? files.OpenForWriting(path, caching)
                                        : files.OpenForReading(path, caching));
  const double seconds = Seconds([&] {
    OnAllRanks(kInFlight, [&](int i) {
      const offload::PageMemory memory =
          ValueOrThrow(offload::PageMemory::Allocate(
              offload::PageAllocator::System(), kPiece));
      std::memset(memory.data(), 0x5a, kPiece);
      const absl::Span<char> bytes(memory.data(), kPiece);
      for (int64_t at = i * kPiece; at < kBytes; at += kInFlight * kPiece) {
        ThrowIfError(writes ? file->PWrite(at, bytes) : file->PRead(at, bytes));
      }
    });
    if (writes) ThrowIfError(file->Sync());
  });
  if (!writes) fs::remove(path);
  return seconds;
}

// Drops the files from the page cache, so that they are read from the disk.
void Forget(const std::string& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int descriptor = open(entry.path().c_str(), O_RDONLY);
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    close(descriptor);
  }
}

using Model = FullyShardedDataParallel<torch::nn::SequentialImpl>;

Model MakeModel(const std::shared_ptr<comm::Communicator>& world) {
  std::shared_ptr<torch::nn::SequentialImpl> layers;
  {
    const DeferredInit deferred;
    layers = MakeChain<torch::nn::LinearImpl>(
        kLayers, torch::nn::LinearOptions(kDim, kDim).bias(false));
  }
  Options options;
  options.wrap_policy = WrapModules<torch::nn::LinearImpl>();
  return ValueOrThrow(FullyShard(layers, world, options));
}

// Returns rank 0's seconds from when all ranks begin until all have finished.
using Timed = std::function<double(const std::function<void()>& work)>;

// Seconds of all turns, by name.
using Figures = std::map<std::string, std::vector<double>>;

void Train(Model& model) {
  for (int step = 0; step < kSteps; ++step) {
    model->forward(torch::ones({kRows, kDim})).sum().backward();
    model->zero_grad();
  }
}

// Copies all shards into memory that is not new.
double CopySeconds(Model& model, const Timed& timed) {
  const std::vector<TensorRange> shards = model->Ranges();
  std::vector<at::Tensor> copies;
  copies.reserve(shards.size());
  for (const TensorRange& named : shards) {
    copies.push_back(at::zeros_like(named.values.detach()));
  }
  return timed([&] {
    for (size_t i = 0; i < copies.size(); ++i) {
      copies[i].copy_(shards[i].values.detach());
    }
  });
}

enum class Measured { kFiles, kBesideTraining };

// Measures everything once and adds what rank 0 has seen.
void Measure(comm::Communicator& world, Measured what, Figures* figures) {
  const std::shared_ptr<comm::Communicator> ranks(&world,
                                                  [](comm::Communicator*) {});
  Model model = MakeModel(ranks);
  const Timed timed = [&](const std::function<void()>& work) {
    const absl::Time deadline = absl::Now() + absl::Minutes(10);
    ThrowIfError(comm::Barrier(world, "begin", deadline));
    return Seconds([&] {
      work();
      ThrowIfError(comm::Barrier(world, "end", deadline));
    });
  };
  auto checkpoints =
      ValueOrThrow(checkpoint::Checkpointer::Open(Directory(), ranks));
  checkpoint::TrainingRun run;
  run.model = model.get();
  const auto note = [&](const char* name, double seconds) {
    if (world.rank() == 0) (*figures)[name].push_back(seconds);
  };
  if (what == Measured::kFiles) {
    note("save", timed([&] { ThrowIfError(checkpoints->Save(0, run)); }));
    if (world.rank() == 0) Forget(Directory());
    note("load", timed([&] { ThrowIfError(checkpoints->Load(0, run)); }));
    return;
  }
  const auto save_async = [&](int64_t step) {
    return timed([&] { ThrowIfError(checkpoints->SaveAsync(step, run)); });
  };
  note("blocked", save_async(1));
  ThrowIfError(checkpoints->Wait());
  note("copy", CopySeconds(model, timed));
  Train(model);
  note("alone", timed([&] { Train(model); }) / kSteps);
  note("later", save_async(2));
  note("beside", timed([&] { Train(model); }) / kSteps);
  ThrowIfError(checkpoints->Wait());
}

// A turn measures all, so that the disk is the same for all.
void TakeTurn(Measured what, Figures* figures) {
  fs::remove_all(Directory());
  if (what == Measured::kFiles) {
    (*figures)["plain_save"].push_back(PlainSeconds(/*writes=*/true));
    (*figures)["plain_load"].push_back(PlainSeconds(/*writes=*/false));
  }
  ThrowIfError(comm::testing::AllOk(comm::testing::RunRanks(
      kRanks,
      [&](comm::Communicator& world) {
        at::set_num_threads(1);
        Measure(world, what, figures);
        return absl::OkStatus();
      },
      absl::Minutes(20))));
  fs::remove_all(Directory());
}

// Measures once for all benchmarks that show something of it. Returns the
// median.
template <Measured what>
double SecondsOf(const std::string& name) {
  constexpr int kTurns = 3;
  static const Figures* const figures = [] {
    auto* const turns = new Figures;
    for (int turn = 0; turn < kTurns; ++turn) TakeTurn(what, turns);
    return turns;
  }();
  return Median(figures->at(name));
}

void Once(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseManualTime()->Iterations(1)->Unit(benchmark::kMillisecond);
}

void Report(benchmark::State& state, const std::string& name) {
  const double seconds = SecondsOf<Measured::kFiles>(name);
  for (auto _ : state) state.SetIterationTime(seconds);
  state.counters["GB/s"] = kBytes / seconds / 1e9;
  state.counters["of_plain"] =
      SecondsOf<Measured::kFiles>("plain_" + name) / seconds;
}

void BM_Save(benchmark::State& state) { Report(state, "save"); }
BENCHMARK(BM_Save)->Apply(Once);

void BM_Load(benchmark::State& state) { Report(state, "load"); }
BENCHMARK(BM_Load)->Apply(Once);

void BM_SaveAsync(benchmark::State& state) {
  const auto seconds = SecondsOf<Measured::kBesideTraining>;
  for (auto _ : state) state.SetIterationTime(seconds("blocked"));
  for (const std::string name : {"blocked", "later", "copy"}) {
    state.counters[name + "_ms"] = 1e3 * seconds(name);
  }
}
BENCHMARK(BM_SaveAsync)->Apply(Once);

void BM_StepsBesideSave(benchmark::State& state) {
  const auto seconds = SecondsOf<Measured::kBesideTraining>;
  for (auto _ : state) state.SetIterationTime(seconds("beside"));
  for (const std::string name : {"alone", "beside"}) {
    state.counters[name + "_ms"] = 1e3 * seconds(name);
  }
}
BENCHMARK(BM_StepsBesideSave)->Apply(Once);

}  // namespace
}  // namespace fsdp
