// Reads and writes a file store sequentially, in the directory that the
// environment variable OFFLOAD_DIRECTORY names (default /var/tmp). Counters:
// `GB/s` of the store; `of_plain`, its speed over that of a program that only
// keeps as many blocks of the same size in flight, with io_uring and O_DIRECT,
// in a file whose space is reserved, as fio(1) does. The two take turns, and
// which one begins alternates; the counter is the median of all turns.
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/plain_file.h"
#include "offload/file_store.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

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

void BM_Store(benchmark::State& state, bool write, bool checksums,
              FileStoreOptions::Queue queue) {
  FileStoreOptions options;
  options.directory = DirectoryIn("OFFLOAD_DIRECTORY");
  options.capacity = kBytes;
  options.block_bytes = state.range(0) << 10;
  options.queue_depth = static_cast<int>(state.range(1));
  options.checksums = checksums;
  options.queue = queue;
  auto store = FileStore::Make(options);
  FSDP_CHECK(store.ok() && (*store)->Create("region", kBytes).ok());
  auto memory = PageMemory::Allocate(PageAllocator::System(), kBytes);
  FSDP_CHECK(memory.ok());
  std::memset(memory->data(), 1, kBytes);
  PlainFile plain(DirectoryIn("OFFLOAD_DIRECTORY"), kBytes, options.block_bytes,
                  options.queue_depth);
  // The first write to space that is only reserved costs more.
  Move(**store, true, memory->data());
  plain.Move(0, kBytes, memory->data());

  const auto store_seconds = [&] {
    return Seconds([&] { Move(**store, write, memory->data()); });
  };
  const auto plain_seconds = [&] {
    return plain.Move(write ? 0 : kBytes, write ? kBytes : 0, memory->data());
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
void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"KiB", "depth"});
  for (const auto& [block, depth] :
       {std::pair{1024, 1}, {1024, 8}, {1024, 32}, {256, 32}, {4096, 8}}) {
    benchmark->Args({block, depth});
  }
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond);
}

using Queue = FileStoreOptions::Queue;

BENCHMARK_CAPTURE(BM_Store, read_crc32c, false, true, Queue::kAutomatic)
    ->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Store, read_unchecked, false, false, Queue::kAutomatic)
    ->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Store, read_threads, false, true, Queue::kThreads)
    ->Args({1024, 8})
    ->ArgNames({"KiB", "depth"})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_Store, write_crc32c, true, true, Queue::kAutomatic)
    ->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Store, write_unchecked, true, false, Queue::kAutomatic)
    ->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Store, write_threads, true, true, Queue::kThreads)
    ->Args({1024, 8})
    ->ArgNames({"KiB", "depth"})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fsdp::offload
