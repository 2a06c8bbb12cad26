#include "checkpoint/files/range_reader.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "checkpoint/files/direct_parts.h"
#include "offload/checksum.h"

namespace fsdp::checkpoint {
namespace {

// What files without checksums are read in multiples of.
constexpr int64_t kUncheckedUnit = 4096;

int64_t UnitOf(const SourceFile& source) {
  return source.sums != nullptr ? kBlockBytes : kUncheckedUnit;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RangeReader>> RangeReader::Create(
    FileSystem& files, std::vector<SourceFile> sources,
    RangeReaderOptions options) {
  int64_t bytes = 0;
  if (options.chunks < 2 || options.chunk_bytes <= 0 ||
      options.chunk_bytes % kBlockBytes != 0 ||
      __builtin_mul_overflow(options.chunks, options.chunk_bytes, &bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "read ranges of files in ", options.chunks, " chunks of ",
        options.chunk_bytes, " bytes: take at least 2, of a multiple of ",
        kBlockBytes, " bytes"));
  }
  FSDP_ASSIGN_OR_RETURN(
      offload::PageMemory memory,
      offload::PageMemory::Allocate(offload::PageAllocator::System(), bytes));
  return absl::WrapUnique(new RangeReader(
      files, std::move(sources), std::move(options), std::move(memory)));
}

RangeReader::RangeReader(FileSystem& files, std::vector<SourceFile> sources,
                         RangeReaderOptions options, offload::PageMemory memory)
    : files_(files),
      sources_(std::move(sources)),
      options_(std::move(options)),
      memory_(std::move(memory)),
      open_(sources_.size()),
      sizes_(sources_.size()),
      chunks_(options_.chunks),
      threads_(options_.chunks - 1) {  // while one is handed out
  for (size_t i = 0; i < chunks_.size(); ++i) {
    chunks_[i].memory = memory_.data() + i * options_.chunk_bytes;
    free_.push_back(&chunks_[i]);
  }
}

absl::Status RangeReader::Open(int64_t source) {
  if (open_[source] != nullptr) return absl::OkStatus();
  const SourceFile& wanted = sources_[source];
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        files_.OpenForReading(wanted.path, options_.caching));
  FSDP_ASSIGN_OR_RETURN(sizes_[source], file->Size());
  if (wanted.sums != nullptr && wanted.sums->bytes != sizes_[source]) {
    return absl::DataLossError(absl::StrCat(
        wanted.path, ": it has ", sizes_[source], " bytes instead of ",
        wanted.sums->bytes, "; the file is damaged; ", options_.advice));
  }
  if (wanted.sums != nullptr &&
      static_cast<int64_t>(wanted.sums->blocks.size()) !=
          BlocksOf(sizes_[source])) {
    return absl::InvalidArgumentError(absl::StrCat(
        "read ", wanted.path, ": there are ", wanted.sums->blocks.size(),
        " checksums for ", BlocksOf(sizes_[source]), " blocks"));
  }
  open_[source] = std::move(file);
  return absl::OkStatus();
}

absl::Status RangeReader::CheckRanges(absl::Span<const ReadRange> ranges) {
  for (const ReadRange& range : ranges) {
    if (range.file < 0 || range.file >= static_cast<int64_t>(sources_.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("read file ", range.file, ": there are only ",
                       sources_.size(), " files"));
    }
    FSDP_RETURN_IF_ERROR(Open(range.file));
    int64_t end = 0;
    if (range.offset < 0 || range.bytes < 0 ||
        __builtin_add_overflow(range.offset, range.bytes, &end) ||
        end > sizes_[range.file]) {
      return absl::OutOfRangeError(absl::StrCat(
          "read ", range.bytes, " bytes at ", range.offset, " of ",
          sources_[range.file].path, ": it has ", sizes_[range.file],
          " bytes; it is not the file that was planned for, or it is damaged"));
    }
  }
  return absl::OkStatus();
}

absl::Status RangeReader::TakeFrom(const Chunk& chunk,
                                   absl::Span<const ReadRange> ranges,
                                   Cursor& cursor, Take take) {
  while (cursor.range < ranges.size()) {
    const ReadRange& range = ranges[cursor.range];
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

void RangeReader::Plan(absl::Span<const ReadRange> ranges, Cursor& cursor,
                       Chunk& chunk) {
  const auto ignore = [](size_t, int64_t, absl::Span<const char>) {
    return absl::OkStatus();
  };
  chunk.source = ranges[cursor.range].file;
  chunk.file = open_[chunk.source].get();
  chunk.read = false;
  const int64_t unit = UnitOf(sources_[chunk.source]);
  chunk.begin = (ranges[cursor.range].offset + cursor.position) / unit * unit;
  chunk.end = chunk.begin;
  // As far as wanted bytes follow without a unit between them.
  while (cursor.range < ranges.size()) {
    const ReadRange& range = ranges[cursor.range];
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
  FSDP_RETURN_IF_ERROR(ForDirectParts(
      chunk.begin, chunk.end, chunk.file->direct_bytes(),
      [&chunk](int64_t begin, int64_t end) {
        return chunk.file->PRead(
            begin,
            absl::MakeSpan(chunk.memory + (begin - chunk.begin), end - begin));
      }));
  return sources_[chunk.source].sums != nullptr ? Verify(chunk)
                                                : absl::OkStatus();
}

absl::Status RangeReader::Verify(const Chunk& chunk) const {
  const SourceFile& source = sources_[chunk.source];
  for (int64_t at = chunk.begin; at < chunk.end; at += kBlockBytes) {
    const int64_t size = std::min(kBlockBytes, chunk.end - at);
    const uint32_t found = offload::Crc32c(
        absl::string_view(chunk.memory + (at - chunk.begin), size));
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

void RangeReader::StartReads(absl::Span<const ReadRange> ranges,
                             Cursor& cursor) {
  while (!free_.empty() && cursor.range < ranges.size()) {
    Chunk* const chunk = free_.back();
    free_.pop_back();
    Plan(ranges, cursor, *chunk);
    pending_.push_back(chunk);
    threads_.Run([this, chunk] {
      absl::Status status = ReadChunk(*chunk);
      absl::MutexLock lock(&mutex_);
      chunk->status = std::move(status);
      chunk->read = true;
    });
  }
}

absl::Status RangeReader::AwaitNext() {
  Chunk* const chunk = pending_.front();
  pending_.pop_front();
  current_ = chunk;
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&chunk->read));
  return chunk->status;
}

absl::Status RangeReader::ReadAll(absl::Span<const ReadRange> ranges,
                                  Take take) {
  FSDP_RETURN_IF_ERROR(CheckRanges(ranges));
  Cursor taken;
  // Passes over empty ranges, and what the call before has left.
  FSDP_RETURN_IF_ERROR(
      TakeFrom(current_ != nullptr ? *current_ : Chunk(), ranges, taken, take));
  Cursor planned = taken;
  while (taken.range < ranges.size()) {
    if (current_ != nullptr) free_.push_back(std::exchange(current_, nullptr));
    StartReads(ranges, planned);
    FSDP_RETURN_IF_ERROR(AwaitNext());
    FSDP_RETURN_IF_ERROR(TakeFrom(*current_, ranges, taken, take));
  }
  return absl::OkStatus();
}

void RangeReader::Drop() {
  // Not to be trusted any more.
  if (current_ != nullptr) free_.push_back(std::exchange(current_, nullptr));
  while (!pending_.empty()) {
    static_cast<void>(AwaitNext());
    free_.push_back(std::exchange(current_, nullptr));
  }
}

absl::Status RangeReader::Read(absl::Span<const ReadRange> ranges, Take take) {
  absl::Status status = ReadAll(ranges, take);
  if (!status.ok()) Drop();
  return status;
}

}  // namespace fsdp::checkpoint
