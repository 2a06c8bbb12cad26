// CRC32C of files, block by block, from the pieces that ranks have written.
#ifndef CHECKPOINT_FILES_CHECKSUMS_H_
#define CHECKPOINT_FILES_CHECKSUMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint {

// What has a checksum of its own; the last one of a file may be shorter.
inline constexpr int64_t kBlockBytes = int64_t{1} << 20;

constexpr int64_t BlocksOf(int64_t bytes) {
  return bytes / kBlockBytes + (bytes % kBlockBytes != 0 ? 1 : 0);
}

// What a file should be.
struct FileSums {
  int64_t bytes = 0;
  uint32_t crc32c = 0;           // of all of it
  std::vector<uint32_t> blocks;  // BlocksOf(bytes)

  friend bool operator==(const FileSums& a, const FileSums& b) {
    return a.bytes == b.bytes && a.crc32c == b.crc32c && a.blocks == b.blocks;
  }
};

// Of the whole file, from `blocks`.
uint32_t CombineBlocks(int64_t bytes, absl::Span<const uint32_t> blocks);

// Bytes of a file that somebody has written, all within one block.
struct Piece {
  int64_t file = 0;  // index in a list that all ranks have
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t crc32c = 0;

  friend bool operator==(const Piece& a, const Piece& b) {
    return a.file == b.file && a.offset == b.offset && a.bytes == b.bytes &&
           a.crc32c == b.crc32c;
  }
};

// Adds `bytes`, which follow in the file at `offset`, to the last piece where
// they continue it, and as pieces of their own.
void AppendPieces(int64_t file, int64_t offset, absl::string_view bytes,
                  std::vector<Piece>& pieces);
// Zeros that nobody writes: a file is as large as it was made, and reads so.
void AppendZeroPieces(int64_t file, int64_t offset, int64_t bytes,
                      std::vector<Piece>& pieces);

struct NamedSize {
  std::string name;
  int64_t bytes = 0;
};

// Of each of `files`, whose indices the pieces have, from those of all ranks in
// any order. Internal, naming file and bytes, unless each byte is in exactly
// one piece.
absl::StatusOr<std::vector<FileSums>> CombinePieces(
    std::vector<Piece> pieces, absl::Span<const NamedSize> files);

// The CRC32C of bytes from those of their parts.

// Of what `first` is the checksum of, followed by the `second_bytes` bytes >= 0
// that `second` is the checksum of. O(log second_bytes).
uint32_t Crc32cCombine(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_CHECKSUMS_H_
