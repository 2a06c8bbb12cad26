#include "base/files/checksums.h"

#include <algorithm>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "util/crc32c.h"

namespace fsdp {
namespace {

using ROCKSDB_NAMESPACE::crc32c::Crc32cCombine;

absl::Status Refuse(absl::string_view name, absl::string_view why) {
  return absl::InternalError(absl::StrCat("checksums of ", name, ": ", why));
}

std::string Range(int64_t begin, int64_t end) {
  return absl::StrCat("bytes [", begin, ", ", end, ")");
}

// Checks that `piece` follows the first `done` bytes of its file.
absl::Status CheckNext(const FilePiece& piece, const NamedSize& file,
                       int64_t done) {
  int64_t end = 0;
  if (piece.offset < 0 || piece.bytes < 0 ||
      __builtin_add_overflow(piece.offset, piece.bytes, &end) ||
      end > file.bytes) {
    return Refuse(file.name,
                  absl::StrCat("a piece of ", piece.bytes, " bytes at ",
                               piece.offset, " of a file of ", file.bytes));
  }
  if (piece.bytes > 0 &&
      piece.offset / kBlockBytes != (end - 1) / kBlockBytes) {
    return Refuse(file.name, absl::StrCat("a piece of several blocks, ",
                                          Range(piece.offset, end)));
  }
  if (piece.offset > done) {
    return Refuse(file.name, absl::StrCat("nobody has written ",
                                          Range(done, piece.offset)));
  }
  if (piece.offset < done) {
    return Refuse(file.name,
                  absl::StrCat("several have written ",
                               Range(piece.offset, std::min(done, end))));
  }
  return absl::OkStatus();
}

// RocksDB's loop over three streams is faster than memory delivers in that
// order: we prefetch earlier, and from front to back.
constexpr size_t kChunk = 2048;
constexpr size_t kAhead = 4096;
constexpr size_t kLine = 64;

}  // namespace

uint32_t Crc32c(absl::string_view bytes, uint32_t before) {
  while (!bytes.empty()) {
    const size_t size = std::min(kChunk, bytes.size());
    const size_t ahead = std::min(kAhead + kChunk, bytes.size());
    for (size_t at = kAhead; at < ahead; at += kLine) {
      __builtin_prefetch(bytes.data() + at);
    }
    before = ROCKSDB_NAMESPACE::crc32c::Extend(before, bytes.data(), size);
    bytes.remove_prefix(size);
  }
  return before;
}

uint32_t CombineBlocks(int64_t bytes, absl::Span<const uint32_t> blocks) {
  uint32_t sum = 0;
  for (const uint32_t block : blocks) {
    const int64_t size = std::min(bytes, kBlockBytes);
    sum = Crc32cCombine(sum, block, size);
    bytes -= size;
  }
  return sum;
}

void AppendPieces(int64_t file, int64_t offset, absl::string_view bytes,
                  std::vector<FilePiece>& pieces) {
  while (!bytes.empty()) {
    const auto size = std::min(static_cast<int64_t>(bytes.size()),
                               kBlockBytes - offset % kBlockBytes);
    const bool continues =
        !pieces.empty() && pieces.back().file == file &&
        pieces.back().offset + pieces.back().bytes == offset &&
        offset % kBlockBytes != 0;
    if (!continues) pieces.push_back({file, offset, 0, 0});
    FilePiece& piece = pieces.back();
    piece.crc32c = Crc32c(bytes.substr(0, size), piece.crc32c);
    piece.bytes += size;
    offset += size;
    bytes.remove_prefix(size);
  }
}

absl::StatusOr<std::vector<FileSums>> CombinePieces(
    std::vector<FilePiece> pieces, absl::Span<const NamedSize> files) {
  std::sort(pieces.begin(), pieces.end(),
            [](const FilePiece& a, const FilePiece& b) {
              return std::tie(a.file, a.offset, a.bytes) <
                     std::tie(b.file, b.offset, b.bytes);
            });
  std::vector<FileSums> sums(files.size());
  for (const FilePiece& piece : pieces) {
    if (piece.file < 0 || piece.file >= static_cast<int64_t>(files.size())) {
      return Refuse(absl::StrCat("file ", piece.file),
                    absl::StrCat("there are only ", files.size(), " files"));
    }
    if (piece.bytes == 0) continue;
    FileSums& sum = sums[piece.file];
    FSDP_RETURN_IF_ERROR(CheckNext(piece, files[piece.file], sum.bytes));
    if (piece.offset % kBlockBytes == 0) {
      sum.blocks.push_back(piece.crc32c);
    } else {
      sum.blocks.back() =
          Crc32cCombine(sum.blocks.back(), piece.crc32c, piece.bytes);
    }
    sum.bytes += piece.bytes;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    if (sums[i].bytes < files[i].bytes) {
      return Refuse(files[i].name,
                    absl::StrCat("nobody has written ",
                                 Range(sums[i].bytes, files[i].bytes)));
    }
    sums[i].crc32c = CombineBlocks(sums[i].bytes, sums[i].blocks);
  }
  return sums;
}

}  // namespace fsdp
