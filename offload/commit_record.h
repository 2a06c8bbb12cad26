// The layout of a file store's file, and a kept file's description of itself:
// one header, written when it is made, and a record at each commit, as plain
// bytes with their own checksums.
#ifndef OFFLOAD_COMMIT_RECORD_H_
#define OFFLOAD_COMMIT_RECORD_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/system_calls.h"

namespace fsdp::offload {

struct FileHeader {
  uint64_t file_id = 0;  // differs from file to file
  uint64_t run = 0;      // FileStoreOptions::run
  int64_t capacity = 0;
  int64_t block_bytes = 0;
  int64_t max_regions = 0;
  std::string owner;

  std::string Encode() const;  // kHeaderBytes long
  // DataLoss: the bytes are not Encode()'s; FailedPrecondition: they are
  // another version's.
  static absl::StatusOr<FileHeader> Decode(absl::string_view bytes);
};

inline constexpr int64_t kHeaderBytes = 4096;
inline constexpr int64_t kMaxOwnerBytes = 1024;

// One write of a block. Generations count the writes; 0 means never written,
// that is zeros.
struct Version {
  uint32_t generation = 0;
  uint32_t checksum = 0;
};

// One block of a region. In a file that is kept or can be rolled back it has
// two places, else one. The last commit (a flush that ended well) is never
// written over: the first write after it goes to the other place.
struct Block {
  Version current;   // what a read must find, in `place`
  Version replaced;  // what `place` held before; stale if found again
  Version other;     // what the other place holds
  uint8_t place = 0;
  bool committed = false;  // `current` is part of the last commit
  bool damaged = false;    // a write has failed, and no later one has succeeded

  void Commit() { committed = current.generation > 0; }
  // Goes back to the last commit, or to zeros if the block is not part of it.
  void RollBack() {
    damaged = false;
    if (committed) return;
    if (other.generation > 0) place = static_cast<uint8_t>(1 - place);
    // Without a commit, the other place has never been written.
    current = std::exchange(other, Version());
    replaced = Version();
    Commit();
  }
};

struct StoredRegion {
  StoredRegion(std::string name, int64_t bytes, int64_t offset,
               int64_t block_bytes)
      : name(std::move(name)),
        bytes(bytes),
        offset(offset),
        block_bytes(block_bytes),
        blocks((bytes + block_bytes - 1) / block_bytes) {}

  // Returns the block's own bytes, fewer than block_bytes at the end of the
  // region.
  int64_t BytesOf(int64_t block) const {
    return std::min(block_bytes, bytes - block * block_bytes);
  }

  std::string name;
  int64_t bytes;
  int64_t offset;  // in each of the file's places
  int64_t block_bytes;
  std::vector<Block> blocks;
};

// Says of each block what it is, and where.
struct CommitRecord {
  uint64_t file_id = 0;
  int64_t commit = 0;
  std::vector<std::shared_ptr<StoredRegion>> regions;

  std::string Encode() const;
  // Ignores bytes after the record. All blocks are committed. DataLoss: it is
  // not a complete record of this file; it may be torn.
  static absl::StatusOr<CommitRecord> Decode(absl::string_view bytes,
                                             const FileHeader& header);

  // Returns the size of the largest record that a file of `header` can have.
  static int64_t MaxBytes(const FileHeader& header);
};

// A scratch file consists of its regions, in two places if it can be rolled
// back. A kept file consists of a header, two records that commits write in
// turn, and two places of the regions.
class FileLayout {
 public:
  FileLayout(std::string path, FileHeader header, bool keep, bool rollback)
      : path(std::move(path)),
        header(std::move(header)),
        keep(keep),
        places(keep || rollback ? 2 : 1),
        record_bytes(keep ? StoredBytes(CommitRecord::MaxBytes(this->header))
                          : 0),
        data_start(keep ? RoundUp(kHeaderBytes + 2 * record_bytes) : 0) {}

  int64_t RecordStart(int64_t commit) const {
    return kHeaderBytes + commit % 2 * record_bytes;
  }
  int64_t BlockStart(int64_t region_offset, int64_t block, int place) const {
    return data_start + place * header.capacity + region_offset +
           block * header.block_bytes;
  }
  int64_t FileBytes() const { return data_start + places * header.capacity; }

  const std::string path;  // as errors name it
  const FileHeader header;
  const bool keep;
  const int places;
  const int64_t record_bytes;
  const int64_t data_start;

 private:
  // Devices with large pages and file systems with large extents prefer this.
  static int64_t RoundUp(int64_t bytes) {
    constexpr int64_t kMiB = int64_t{1} << 20;
    return (bytes + kMiB - 1) / kMiB * kMiB;
  }
};

// Two records take turns: commit n replaces commit n-2, after the blocks that
// it names are on the disk. A process that is killed at any instant leaves
// record n complete or torn. A torn record is ignored, and commit n-1 is intact
// then. Used by one thread at a time, while nothing else is in flight. Calls
// leave the queue woken.
class CommitLog {
 public:
  static absl::StatusOr<CommitLog> Make(const FileLayout& layout);

  absl::Status WriteHeader(IoQueue& queue);

  // To commit is Sync(), so that the blocks it names are on the disk, then
  // Write(), then Sync().
  absl::Status Write(IoQueue& queue, const CommitRecord& record);
  absl::Status Sync(IoQueue& queue, absl::string_view what);

  // Returns the complete records, the older one first.
  absl::StatusOr<std::vector<CommitRecord>> ReadAll(IoQueue& queue);

  // Erases the record of this commit.
  absl::Status Drop(IoQueue& queue, int64_t commit);

 private:
  CommitLog(const FileLayout& layout, PageMemory memory)
      : layout_(&layout), memory_(std::move(memory)) {}

  absl::Status WriteAt(IoQueue& queue, absl::string_view what,
                       absl::string_view bytes, int64_t offset);

  const FileLayout* layout_;
  PageMemory memory_;  // for one record
};

// Reads the header of the file behind `queue`. `path` is for errors; `memory`
// has room for kHeaderBytes.
absl::StatusOr<FileHeader> ReadHeader(IoQueue& queue, char* memory,
                                      absl::string_view path);

}  // namespace fsdp::offload

#endif  // OFFLOAD_COMMIT_RECORD_H_
