// Writes and reads ranges of one large file with checksums, in the directory
// that the environment variable CHECKPOINT_DIRECTORY names (default /var/tmp).
// Counters: `GB/s`; `of_plain`, the speed over that of a program that only
// keeps as many pieces of 8 MiB in flight, past the page cache, by threads. The
// two take turns, and which one begins alternates; the counter is the median of
// all turns. Arguments: MiB of a buffer, buffers.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "benchmark/benchmark.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/range_writer.h"
#include "offload/page_memory.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kBytes = int64_t{1} << 30;
constexpr int64_t kPlainPiece = int64_t{8} << 20;
// Ranges have odd sizes and offsets, as parameters do.
constexpr int64_t kRange = (int64_t{33} << 20) + 1028;

std::string PathOf(const char* name) {
  const char* const directory = std::getenv("CHECKPOINT_DIRECTORY");
  return absl::StrCat(directory != nullptr ? directory : "/var/tmp",
                      "/range_io_benchmark.", name);
}

template <typename Work>
double Seconds(Work work) {
  const absl::Time start = absl::Now();
  work();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

// Bytes that cost a copy, as those of a shard do.
const std::string& Source() {
  static const std::string* const source = new std::string(kPlainPiece, '\x5a');
  return *source;
}

void PlainMove(const std::string& path, bool write, int threads) {
  auto file = write ? RealFileSystem().OpenForWriting(path, Caching::kDirect)
                    : RealFileSystem().OpenForReading(path, Caching::kDirect);
  FSDP_CHECK(file.ok());
  if (write) FSDP_CHECK((*file)->SetSize(0).ok());
  if (write) FSDP_CHECK((*file)->SetSize(kBytes).ok());
  auto memory = offload::PageMemory::Allocate(offload::PageAllocator::System(),
                                              kPlainPiece * threads);
  FSDP_CHECK(memory.ok());
  std::memset(memory->data(), 1, memory->bytes());
  std::atomic<int64_t> next{0};
  std::vector<std::thread> running;
  running.reserve(threads);
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      char* const piece = memory->data() + i * kPlainPiece;
      for (;;) {
        const int64_t at = next.fetch_add(kPlainPiece);
        if (at >= kBytes) return;
        const absl::Status status =
            write ? (*file)->PWrite(at, absl::MakeConstSpan(piece, kPlainPiece))
                  : (*file)->PRead(at, absl::MakeSpan(piece, kPlainPiece));
        FSDP_CHECK(status.ok());
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  if (write) FSDP_CHECK((*file)->Sync().ok());
}

std::vector<Piece> WriteRanges(const std::string& path,
                               const RangeWriterOptions& options) {
  auto writer = RangeWriter::Create(RealFileSystem(), {path}, options);
  FSDP_CHECK(writer.ok());
  FSDP_CHECK((*writer)->SetSize(0, 0).ok());
  FSDP_CHECK((*writer)->SetSize(0, kBytes).ok());
  const auto fill = [](int64_t position, absl::Span<char> out) {
    const int64_t at = position % (kPlainPiece / 2);
    std::memcpy(out.data(), Source().data() + at, out.size());
    return absl::OkStatus();
  };
  for (int64_t at = 0; at < kBytes; at += kRange) {
    FSDP_CHECK(
        (*writer)->Write(0, at, std::min(kRange, kBytes - at), fill).ok());
  }
  auto pieces = (*writer)->Finish();
  FSDP_CHECK(pieces.ok());
  return *std::move(pieces);
}

void ReadRanges(const std::string& path, const FileSums* sums,
                const RangeReaderOptions& options) {
  auto reader = RangeReader::Create(RealFileSystem(), {{path, sums}}, options);
  FSDP_CHECK(reader.ok());
  std::vector<FilePlace> ranges;
  for (int64_t at = 0; at < kBytes; at += kRange) {
    ranges.push_back({0, at, std::min(kRange, kBytes - at)});
  }
  // It is larger than the processor's caches, as a shard is.
  std::string shard(int64_t{64} << 20, '\0');
  size_t at = 0;
  const auto take = [&](size_t, int64_t, absl::Span<const char> bytes) {
    if (at + bytes.size() > shard.size()) at = 0;
    std::memcpy(&shard[at], bytes.data(), bytes.size());
    at += bytes.size();
    return absl::OkStatus();
  };
  FSDP_CHECK((*reader)->Read(ranges, take).ok());
}

// Runs both once in each iteration.
template <typename Ours, typename Plain>
void TakeTurns(benchmark::State& state, Ours ours, Plain plain) {
  std::vector<double> ratios;
  bool plain_first = false;
  for (auto _ : state) {
    double of_plain = plain_first ? Seconds(plain) : 0;
    const double of_ours = Seconds(ours);
    if (!plain_first) of_plain = Seconds(plain);
    plain_first = !plain_first;
    state.SetIterationTime(of_ours);
    ratios.push_back(of_plain / of_ours);
  }
  const auto median =
      ratios.begin() + static_cast<std::ptrdiff_t>(ratios.size() / 2);
  std::nth_element(ratios.begin(), median, ratios.end());
  state.counters["of_plain"] = *median;
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(kBytes) * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate);
}

void BM_Write(benchmark::State& state) {
  RangeWriterOptions options;
  options.buffer_bytes = state.range(0) << 20;
  options.buffers = static_cast<int>(state.range(1));
  const std::string path = PathOf("ours");
  const std::string plain = PathOf("plain");
  TakeTurns(
      state, [&] { WriteRanges(path, options); },
      [&] { PlainMove(plain, /*write=*/true, options.buffers - 1); });
  FSDP_CHECK(RealFileSystem().RemoveFile(path).ok());
  FSDP_CHECK(RealFileSystem().RemoveFile(plain).ok());
}

void BM_Read(benchmark::State& state, Caching caching, bool checked) {
  RangeReaderOptions options;
  options.chunk_bytes = state.range(0) << 20;
  options.chunks = static_cast<int>(state.range(1));
  options.caching = caching;
  const std::string path = PathOf("ours");
  auto sums =
      CombinePieces(WriteRanges(path, RangeWriterOptions()), {{path, kBytes}});
  FSDP_CHECK(sums.ok());
  TakeTurns(
      state,
      [&] { ReadRanges(path, checked ? &(*sums)[0] : nullptr, options); },
      [&] { PlainMove(path, /*write=*/false, options.chunks - 1); });
  FSDP_CHECK(RealFileSystem().RemoveFile(path).ok());
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"MiB", "buffers"});
  for (const auto& [mebibytes, buffers] :
       {std::pair{4, 4}, {4, 8}, {8, 4}, {1, 4}}) {
    benchmark->Args({mebibytes, buffers});
  }
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(5);
}

BENCHMARK(BM_Write)->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Read, direct, Caching::kDirect, true)->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Read, cached, Caching::kCached, true)->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Read, direct_unchecked, Caching::kDirect, false)
    ->Apply(Shapes);

}  // namespace
}  // namespace fsdp::checkpoint
