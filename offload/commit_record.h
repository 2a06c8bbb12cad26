// A kept file's description of itself: one header, written when it is made, and
// a record at each commit, as plain bytes with their own checksums.
#ifndef OFFLOAD_COMMIT_RECORD_H_
#define OFFLOAD_COMMIT_RECORD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::offload {

struct FileHeader {
  uint64_t file_id = 0;  // differs from file to file
  uint64_t run = 0;      // FileStoreOptions::run
  int64_t capacity = 0;
  int64_t block_bytes = 0;
  int64_t max_regions = 0;
  bool checksums = true;
  std::string owner;

  std::string Encode() const;  // kHeaderBytes long
  // DataLoss: the bytes are not Encode()'s; FailedPrecondition: they are
  // another version's.
  static absl::StatusOr<FileHeader> Decode(absl::string_view bytes);
};

inline constexpr int64_t kHeaderBytes = 4096;
inline constexpr int64_t kMaxOwnerBytes = 1024;

struct CommitRecord {
  struct Block {
    uint32_t generation = 0;
    uint32_t checksum = 0;
    uint8_t place = 0;
  };
  struct Region {
    std::string name;
    int64_t bytes = 0;
    int64_t offset = 0;
    std::vector<Block> blocks;
  };

  uint64_t file_id = 0;
  int64_t commit = 0;
  std::vector<Region> regions;

  std::string Encode() const;
  // Ignores bytes after the record. DataLoss: it is not a complete record of
  // this file; it may be torn.
  static absl::StatusOr<CommitRecord> Decode(absl::string_view bytes,
                                             const FileHeader& header);

  // Returns the size of the largest record that a file of `header` can have.
  static int64_t MaxBytes(const FileHeader& header);
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_COMMIT_RECORD_H_
