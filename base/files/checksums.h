// CRC32Cs of bytes, and of files, block by block, from pieces that several have
// written.
#ifndef BASE_FILES_CHECKSUMS_H_
#define BASE_FILES_CHECKSUMS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"

namespace fsdp {

// Returns the CRC32C of `bytes`, computed by the processor's own instruction if
// it has one. `before` is the checksum of the bytes in front of `bytes`.
// Thread-safe.
uint32_t Crc32c(absl::string_view bytes, uint32_t before = 0);

// Each block of a file has its own checksum; the last block of a file may be
// shorter.
inline constexpr int64_t kBlockBytes = int64_t{1} << 20;

constexpr int64_t BlocksOf(int64_t bytes) {
  return bytes / kBlockBytes + (bytes % kBlockBytes != 0 ? 1 : 0);
}

// The size and the checksums that a file must have.
struct FileSums {
  int64_t bytes = 0;
  uint32_t crc32c = 0;           // of the whole file
  std::vector<uint32_t> blocks;  // BlocksOf(bytes) checksums

  friend bool operator==(const FileSums& a, const FileSums& b) {
    return a.bytes == b.bytes && a.crc32c == b.crc32c && a.blocks == b.blocks;
  }
};

// Returns the checksum of the whole file from those of its blocks.
uint32_t CombineBlocks(int64_t bytes, absl::Span<const uint32_t> blocks);

// Bytes of a file that somebody has written, all within one block.
struct FilePiece {
  int64_t file = 0;  // index in a list that all have
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t crc32c = 0;

  friend bool operator==(const FilePiece& a, const FilePiece& b) {
    return a.file == b.file && a.offset == b.offset && a.bytes == b.bytes &&
           a.crc32c == b.crc32c;
  }
};

// Adds `bytes`, which the file has from `offset` on: to the last piece where
// they continue it, otherwise as new pieces.
void AppendPieces(int64_t file, int64_t offset, absl::string_view bytes,
                  std::vector<FilePiece>& pieces);

// Returns the sums of each of `files`, which pieces name by index, from the
// pieces of all writers in any order. Internal, naming file and bytes: a byte
// is in no piece or in several.
absl::StatusOr<std::vector<FileSums>> CombinePieces(
    std::vector<FilePiece> pieces, absl::Span<const NamedSize> files);

}  // namespace fsdp

#endif  // BASE_FILES_CHECKSUMS_H_
