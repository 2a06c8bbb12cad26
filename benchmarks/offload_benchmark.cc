// Measures offloading to an SSD, in the directory that the environment variable
// OFFLOAD_DIRECTORY names (default /var/tmp).
//   ./bazelw run -c opt //benchmarks:offload_benchmark
//
// BM_Step is the optimizer's step of a model whose states are there: one rank,
// AdamW, units of 32 MiB. Counters: `GB/s` that the step reads and writes;
// `of_disk`, that over what the disk gives to a program that only reads and
// writes as much of each, in turns with the steps, median; `of_resident`, the
// time of the same step in memory over this one's; `MB_in_memory`, buffers and
// what rests there.
//
// BM_Store reads and writes a file store sequentially. Counters: `GB/s` of the
// store; `of_plain`, its speed over that of a program that only keeps as many
// blocks of the same size in flight, with io_uring and O_DIRECT, in a file
// whose space is reserved, as fio(1) does. The two take turns, and which one
// begins alternates; the counter is the median of all turns.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <liburing.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/chain.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_space.h"
#include "offload/file_store.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

// An unnamed file whose space is reserved and written once: what a disk gives
// to a program that only keeps it busy. It moves blocks by io_uring, past the
// page cache if the file system can, `depth` of them in flight. It checks
// instead of returning errors.
class PlainFile {
 public:
  PlainFile(const std::string& directory, int64_t bytes, int64_t block_bytes,
            int depth)
      : bytes_(bytes), block_bytes_(block_bytes), depth_(depth) {
    std::string name = absl::StrCat(directory, "/plain_file_XXXXXX");
    descriptor_ = mkostemp(name.data(), O_CLOEXEC);
    FSDP_CHECK(descriptor_ >= 0);
    unlink(name.c_str());
    FSDP_CHECK(fallocate(descriptor_, 0, 0, bytes) == 0);
    // If it is refused, this file and the stores use the page cache.
    fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_DIRECT);
    FSDP_CHECK(io_uring_queue_init(depth, &ring_, 0) == 0);
  }
  ~PlainFile() {
    io_uring_queue_exit(&ring_);
    close(descriptor_);
  }
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;

  // Reads the first `read_bytes` and writes the last `write_bytes`, in order
  // and at the same time, in whole blocks of `memory`, which starts at a page
  // and is as large as the file. Returns seconds.
  double Move(int64_t read_bytes, int64_t write_bytes, char* memory) {
    const absl::Time begin = absl::Now();
    int64_t read = 0;
    int64_t written = 0;
    int in_flight = 0;
    while (read < read_bytes || written < write_bytes) {
      // Reads and writes end together.
      const bool writes = written * read_bytes <= read * write_bytes
                              ? written < write_bytes
                              : read >= read_bytes;
      const int64_t offset = writes ? bytes_ - block_bytes_ - written : read;
      Start(writes, memory + offset, offset);
      (writes ? written : read) += block_bytes_;
      if (++in_flight == depth_) {
        AwaitOne();
        --in_flight;
      }
    }
    for (; in_flight > 0; --in_flight) AwaitOne();
    return absl::ToDoubleSeconds(absl::Now() - begin);
  }

 private:
  void Start(bool write, char* memory, int64_t offset) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    FSDP_CHECK(entry != nullptr);
    if (write) {
      io_uring_prep_write(entry, descriptor_, memory, block_bytes_, offset);
    } else {
      io_uring_prep_read(entry, descriptor_, memory, block_bytes_, offset);
    }
    FSDP_CHECK(io_uring_submit(&ring_) == 1);
  }

  void AwaitOne() {
    io_uring_cqe* entry = nullptr;
    FSDP_CHECK(io_uring_wait_cqe(&ring_, &entry) == 0);
    FSDP_CHECK(entry->res == block_bytes_);
    io_uring_cqe_seen(&ring_, entry);
  }

  const int64_t bytes_;
  const int64_t block_bytes_;
  const int depth_;
  int descriptor_ = -1;
  io_uring ring_ = {};
};

constexpr int64_t kDim = 2048;
constexpr int kUnits = 4;
constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr int kDepth = 16;

// Returns memory that begins a page and is written.
offload::PageMemory Pages(int64_t bytes) {
  auto memory =
      offload::PageMemory::Allocate(offload::PageAllocator::System(), bytes);
  FSDP_CHECK(memory.ok());
  std::memset(memory->data(), 1, bytes);
  return *std::move(memory);
}

// Is a model with its optimizer, whose step is timed.
class Training {
 public:
  explicit Training(const OffloadOptions& offload) {
    Options options;
    options.wrap_policy = WrapModules<PairImpl>();
    options.offload = offload;
    auto group = ValueOrThrow(comm::CreateLocalGroup(1));
    model_ = ValueOrThrow(FullyShard(
        MakeChain<PairImpl>(kUnits, kDim),
        std::shared_ptr<comm::Communicator>(std::move(group[0])), options));
    optimizer_ = std::make_unique<FusedAdamW>(model_->Parameters(),
                                              torch::optim::AdamWOptions(1e-4));
  }

  double StepSeconds() {
    const at::Tensor x = at::full({1, kDim}, 0.5);
    optimizer_->zero_grad();
    ThrowIfError(model_->Backward(model_->forward(x).square().mean()));
    return Seconds([this] { optimizer_->step(); });
  }

  const OffloadSpace* space() { return model_->sharded_model().offload(); }

 private:
  FullyShardedDataParallel<torch::nn::SequentialImpl> model_{nullptr};
  std::unique_ptr<FusedAdamW> optimizer_;
};

// Returns the bytes that all stores have read and written so far.
std::pair<int64_t, int64_t> MovedBy(const OffloadSpace& space) {
  std::pair<int64_t, int64_t> moved;
  for (const offload::StoreStats& store : space.stats().stores) {
    moved.first += store.reads.bytes;
    moved.second += store.writes.bytes;
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
  const offload::PageMemory memory = Pages(kPlainBytes);
  plain.Move(0, kPlainBytes, memory.data());
  for (int i = 0; i < 2; ++i) {
    resident.StepSeconds();
    training.StepSeconds();
  }
  std::vector<double> of_disk;
  std::vector<double> of_resident;
  double seconds = 0;
  int64_t bytes = 0;
  for (auto _ : state) {
    const auto before = MovedBy(*training.space());
    const double step = training.StepSeconds();
    const auto after = MovedBy(*training.space());
    const int64_t read = after.first - before.first;
    const int64_t written = after.second - before.second;
    const double disk =
        plain.Move(InBlocks(read), InBlocks(written), memory.data());
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

namespace fsdp::offload {
namespace {

constexpr int64_t kBytes = int64_t{256} << 20;
constexpr int64_t kTransferBytes = int64_t{16} << 20;

void Move(FileStore& store, bool write, char* memory) {
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (int64_t at = 0; at < kBytes; at += kTransferBytes) {
    const absl::Span<char> part(memory + at, kTransferBytes);
    auto transfer = write ? store.Write("region", at, part)
                          : store.Read("region", at, part);
    FSDP_CHECK(transfer.ok());
    transfers.push_back(*std::move(transfer));
  }
  for (const auto& transfer : transfers) {
    FSDP_CHECK(transfer->Wait(absl::InfiniteFuture()).ok());
  }
}

void BM_Store(benchmark::State& state, bool write,
              std::optional<QueueKind> queue) {
  FileStoreOptions options;
  options.directory = DirectoryIn("OFFLOAD_DIRECTORY");
  options.capacity = kBytes;
  options.block_bytes = state.range(0) << 10;
  options.queue_depth = static_cast<int>(state.range(1));
  options.queue = queue;
  auto store = FileStore::Make(options);
  FSDP_CHECK(store.ok() && (*store)->Create("region", kBytes).ok());
  const PageMemory memory = Pages(kBytes);
  PlainFile plain(DirectoryIn("OFFLOAD_DIRECTORY"), kBytes, options.block_bytes,
                  options.queue_depth);
  // The first write to space that is only reserved costs more.
  Move(**store, true, memory.data());
  plain.Move(0, kBytes, memory.data());

  const auto store_seconds = [&] {
    return Seconds([&] { Move(**store, write, memory.data()); });
  };
  const auto plain_seconds = [&] {
    return plain.Move(write ? 0 : kBytes, write ? kBytes : 0, memory.data());
  };
  std::vector<double> ratios;
  bool plain_first = false;
  for (auto _ : state) {
    double of_plain = plain_first ? plain_seconds() : 0;
    const double of_store = store_seconds();
    if (!plain_first) of_plain = plain_seconds();
    plain_first = !plain_first;
    state.SetIterationTime(of_store);
    ratios.push_back(of_plain / of_store);
  }
  state.counters["of_plain"] = Median(ratios);
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(kBytes) * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate);
}

// Arguments are KiB of a block and blocks in flight.
void Shape(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"KiB", "depth"})
      ->Args({1024, 8})
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}
void Shapes(benchmark::internal::Benchmark* benchmark) {
  Shape(benchmark->Args({1024, 1}));
  benchmark->Args({1024, 32})->Args({256, 32})->Args({4096, 8});
}

BENCHMARK_CAPTURE(BM_Store, read, false, std::nullopt)->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Store, read_threads, false, QueueKind::kThreads)
    ->Apply(Shape);
BENCHMARK_CAPTURE(BM_Store, write, true, std::nullopt)->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Store, write_threads, true, QueueKind::kThreads)
    ->Apply(Shape);

}  // namespace
}  // namespace fsdp::offload
