// Where things lie in the file of a file store.
#ifndef OFFLOAD_FILE_LAYOUT_H_
#define OFFLOAD_FILE_LAYOUT_H_

#include <cstdint>
#include <string>

#include "offload/commit_record.h"
#include "offload/param_store.h"
#include "offload/stored_region.h"

namespace fsdp::offload {

// A scratch file is its regions, once, or in two places when it can be rolled
// back (stored_region.h). One that is kept is a header, two records that
// commits write in turn, and two places.
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
  int64_t BlockStart(const StoredRegion& region, int64_t block,
                     int place) const {
    return data_start + place * header.capacity + region.offset +
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
  // Devices with large pages and file systems with large extents like it.
  static int64_t RoundUp(int64_t bytes) {
    constexpr int64_t kMiB = int64_t{1} << 20;
    return (bytes + kMiB - 1) / kMiB * kMiB;
  }
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_FILE_LAYOUT_H_
