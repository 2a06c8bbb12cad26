// The directory of a zip file of stored entries.
#ifndef CHECKPOINT_TORCH_ARCHIVE_ZIP_READER_H_
#define CHECKPOINT_TORCH_ARCHIVE_ZIP_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint {

// Fills `bytes` from `offset` of a file, or says why not; names the file.
using ReadAt =
    std::function<absl::Status(int64_t offset, absl::Span<char> bytes)>;

struct ZipEntry {
  std::string name;
  int64_t bytes = 0;
  int64_t header = 0;  // of its local header, in the zip
  int64_t limit = 0;   // where the next entry or the directory begins
  uint32_t crc = 0;    // 0 also where the writer did not compute it
};

// Takes memory in proportion to the directory. Reads 4 KiB at a time where less
// is needed: two reads open a zip of one tensor.
class ZipReader {
 public:
  // The zip at [offset, offset + length) of the file. InvalidArgument for what
  // is none or spans disks, for encrypted or compressed entries, and for
  // entries that overlap, leave the zip or have the same name.
  static absl::StatusOr<ZipReader> Open(ReadAt read, int64_t offset,
                                        int64_t length);

  // By rising place.
  const std::vector<ZipEntry>& entries() const { return entries_; }
  // Null for a name that is not there.
  const ZipEntry* Find(absl::string_view name) const;

  // Where the entry's bytes begin in the whole file: reads its local header.
  absl::StatusOr<int64_t> PayloadOffset(const ZipEntry& entry);
  // All of it; InvalidArgument above `max_bytes` and for a wrong CRC.
  absl::StatusOr<std::string> Read(const ZipEntry& entry, int64_t max_bytes);

 private:
  ZipReader(ReadAt read, int64_t offset, int64_t length)
      : read_(std::move(read)), offset_(offset), length_(length) {}

  struct Directory {
    int64_t at = 0;
    int64_t bytes = 0;
    int64_t count = 0;
  };
  absl::StatusOr<Directory> FindDirectory();
  absl::StatusOr<Directory> ReadEnd64(int64_t at);
  absl::Status ReadDirectory(const Directory& directory);
  absl::Status CheckPlaces(int64_t directory_at);
  // [at, at + count) of the zip; `count` <= length_.
  absl::StatusOr<std::string> Bytes(int64_t at, int64_t count);

  ReadAt read_;
  int64_t offset_;
  int64_t length_;
  std::string window_;  // what was read last
  int64_t window_at_ = 0;
  std::vector<ZipEntry> entries_;
  absl::flat_hash_map<std::string, size_t> by_name_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_ZIP_READER_H_
