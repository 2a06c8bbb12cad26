#include "checkpoint/files/range_reader.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

// Files without checksums are read in multiples of this.
constexpr int64_t kUncheckedUnit = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<RangeReader>> RangeReader::Create(
    FileSystem& files, std::vector<SourceFile> sources,
    RangeReaderOptions options) {
  FSDP_CHECK(options.chunks >= 2 && options.chunk_bytes % kBlockBytes == 0);
  const int64_t bytes = options.chunks * options.chunk_bytes;
  offload::PageAllocator& system = offload::PageAllocator::System();
  absl::StatusOr<offload::PageMemory> memory = offload::PageMemory::Allocate(
      options.pages != nullptr ? *options.pages : system, bytes);
  if (!memory.ok()) memory = offload::PageMemory::Allocate(system, bytes);
  FSDP_RETURN_IF_ERROR(memory.status());
  return absl::WrapUnique(new RangeReader(
      files, std::move(sources), std::move(options), *std::move(memory)));
}

RangeReader::RangeReader(FileSystem& files, std::vector<SourceFile> sources,
                         RangeReaderOptions options, offload::PageMemory memory)
    : files_(files),
      sources_(std::move(sources)),
      options_(std::move(options)),
      memory_(std::move(memory)),
      open_(sources_.size()),
      sizes_(sources_.size(), -1),
      chunks_(options_.chunks) {
  // One chunk is handed out.
  threads_.Start("to read checkpoints", options_.chunks - 1).IgnoreError();
  for (size_t i = 0; i < chunks_.size(); ++i) {
    chunks_[i].memory = memory_.data() + i * options_.chunk_bytes;
    free_.push_back(&chunks_[i]);
  }
}

absl::StatusOr<std::shared_ptr<File>> RangeReader::Open(int64_t source) {
  if (open_[source] != nullptr) return open_[source];
  FSDP_ASSIGN_OR_RETURN(
      std::shared_ptr<File> file,
      files_.OpenForReading(sources_[source].path, options_.caching));
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, file->Size());
  FSDP_RETURN_IF_ERROR(CheckSize(source, bytes));
  sizes_[source] = bytes;
  open_[source] = file;
  opened_.push_back(source);
  if (opened_.size() > size_t{kMostOpenFiles}) {
    open_[opened_.front()] = nullptr;
    opened_.pop_front();
  }
  return file;
}

absl::Status RangeReader::CheckSize(int64_t source, int64_t bytes) const {
  const SourceFile& wanted = sources_[source];
  if (wanted.sums != nullptr && wanted.sums->bytes != bytes) {
    return absl::DataLossError(absl::StrCat(
        wanted.path, ": it has ", bytes, " bytes instead of ",
        wanted.sums->bytes, "; the file is damaged; ", options_.advice));
  }
  FSDP_CHECK(wanted.sums == nullptr ||
             static_cast<int64_t>(wanted.sums->blocks.size()) ==
                 BlocksOf(bytes));
  if (sizes_[source] >= 0 && sizes_[source] != bytes) {
    return absl::DataLossError(absl::StrCat(
        wanted.path, ": it has ", bytes, " bytes instead of ", sizes_[source],
        ": somebody has changed it while it was read; load it again"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> RangeReader::SizeOf(int64_t file) {
  FSDP_CHECK(file >= 0 && file < static_cast<int64_t>(sources_.size()));
  if (sizes_[file] < 0) FSDP_RETURN_IF_ERROR(Open(file).status());
  return sizes_[file];
}

absl::Status RangeReader::TakeFrom(const Chunk& chunk,
                                   absl::Span<const FilePlace> ranges,
                                   Cursor& cursor, Take take) {
  while (cursor.range < ranges.size()) {
    const FilePlace& range = ranges[cursor.range];
    const int64_t at = range.offset + cursor.position;
    if (cursor.position < range.bytes) {
      const bool inside =
          range.file == chunk.source && at >= chunk.begin && at < chunk.end;
      if (!inside) break;
      const int64_t size =
          std::min(range.bytes - cursor.position, chunk.end - at);
      FSDP_RETURN_IF_ERROR(
          take(cursor.range, cursor.position,
               absl::MakeConstSpan(chunk.memory + (at - chunk.begin), size)));
      cursor.position += size;
    }
    if (cursor.position == range.bytes) cursor = {cursor.range + 1, 0};
  }
  return absl::OkStatus();
}

void RangeReader::Plan(absl::Span<const FilePlace> ranges, Cursor& cursor,
                       Chunk& chunk) {
  const auto ignore = [](size_t, int64_t, absl::Span<const char>) {
    return absl::OkStatus();
  };
  chunk.source = ranges[cursor.range].file;
  chunk.read = false;
  const bool is_checked = sources_[chunk.source].sums != nullptr;
  const int64_t unit = is_checked ? kBlockBytes : kUncheckedUnit;
  chunk.begin = (ranges[cursor.range].offset + cursor.position) / unit * unit;
  chunk.end = chunk.begin;
  // Grows the chunk while wanted bytes follow without a unit between them.
  while (cursor.range < ranges.size()) {
    const FilePlace& range = ranges[cursor.range];
    const int64_t at = range.offset + cursor.position;
    const int64_t room = options_.chunk_bytes - (chunk.end - chunk.begin);
    if (range.file != chunk.source || at < chunk.end ||
        at - chunk.end >= unit || room == 0) {
      break;
    }
    const int64_t wanted = range.offset + range.bytes - chunk.end;
    const int64_t units = wanted / unit + (wanted % unit != 0 ? 1 : 0);
    chunk.end += std::min({room / unit, units}) * unit;
    chunk.end = std::min(chunk.end, sizes_[chunk.source]);
    static_cast<void>(TakeFrom(chunk, ranges, cursor, ignore));
  }
}

absl::Status RangeReader::ReadChunk(const Chunk& chunk) const {
  const SourceFile& source = sources_[chunk.source];
  FSDP_RETURN_IF_ERROR(chunk.file->PRead(
      chunk.begin, absl::MakeSpan(chunk.memory, chunk.end - chunk.begin)));
  if (source.sums == nullptr) return absl::OkStatus();
  for (int64_t at = chunk.begin; at < chunk.end; at += kBlockBytes) {
    const int64_t size = std::min(kBlockBytes, chunk.end - at);
    const uint32_t found =
        Crc32c(absl::string_view(chunk.memory + (at - chunk.begin), size));
    const uint32_t expected = source.sums->blocks[at / kBlockBytes];
    if (found == expected) continue;
    return absl::DataLossError(
        absl::StrCat(source.path, ", bytes [", at, ", ", at + size,
                     "): their CRC32C is ", absl::Hex(found, absl::kZeroPad8),
                     " instead of ", absl::Hex(expected, absl::kZeroPad8),
                     "; the file is damaged; ", options_.advice));
  }
  return absl::OkStatus();
}

absl::Status RangeReader::StartReads(absl::Span<const FilePlace> ranges,
                                     Cursor& cursor) {
  while (!free_.empty() && cursor.range < ranges.size()) {
    FSDP_ASSIGN_OR_RETURN(auto file, Open(ranges[cursor.range].file));
    Chunk* const chunk = free_.back();
    free_.pop_back();
    Plan(ranges, cursor, *chunk);
    chunk->file = std::move(file);
    pending_.push_back(chunk);
    threads_.Run([this, chunk] {
      absl::Status status = ReadChunk(*chunk);
      absl::MutexLock lock(&mutex_);
      chunk->status = std::move(status);
      chunk->read = true;
    });
  }
  return absl::OkStatus();
}

absl::Status RangeReader::AwaitNext() {
  Chunk* const chunk = pending_.front();
  pending_.pop_front();
  current_ = chunk;
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&chunk->read));
  chunk->file = nullptr;
  return chunk->status;
}

absl::Status RangeReader::ReadAll(
    absl::Span<const FilePlace> ranges, Take take,
    const std::function<absl::Status()>& before_reuse) {
  for (const FilePlace& range : ranges) {
    FSDP_ASSIGN_OR_RETURN(const int64_t size, SizeOf(range.file));
    int64_t end = 0;
    if (range.offset < 0 || range.bytes < 0 ||
        __builtin_add_overflow(range.offset, range.bytes, &end) || end > size) {
      return absl::OutOfRangeError(absl::StrCat(
          "read ", range.bytes, " bytes at ", range.offset, " of ",
          sources_[range.file].path, ": it has ", size,
          " bytes; it is not the file that was planned for, or it is damaged"));
    }
  }
  Cursor taken;
  // Skips empty ranges, and takes what the call before has left.
  Chunk nothing;
  FSDP_RETURN_IF_ERROR(
      TakeFrom(current_ != nullptr ? *current_ : nothing, ranges, taken, take));
  Cursor planned = taken;
  while (taken.range < ranges.size()) {
    if (current_ != nullptr) {
      if (before_reuse != nullptr) FSDP_RETURN_IF_ERROR(before_reuse());
      free_.push_back(std::exchange(current_, nullptr));
    }
    FSDP_RETURN_IF_ERROR(StartReads(ranges, planned));
    FSDP_RETURN_IF_ERROR(AwaitNext());
    FSDP_RETURN_IF_ERROR(TakeFrom(*current_, ranges, taken, take));
  }
  return absl::OkStatus();
}

absl::Status RangeReader::Read(
    absl::Span<const FilePlace> ranges, Take take,
    const std::function<absl::Status()>& before_reuse) {
  absl::Status status = ReadAll(ranges, take, before_reuse);
  if (status.ok()) return status;
  // After an error the chunk is not trusted any more.
  if (current_ != nullptr) free_.push_back(std::exchange(current_, nullptr));
  while (!pending_.empty()) {
    static_cast<void>(AwaitNext());
    free_.push_back(std::exchange(current_, nullptr));
  }
  return status;
}

}  // namespace fsdp::checkpoint
