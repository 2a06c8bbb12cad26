// Reads what lies at the places of a DCP checkpoint's files.
#ifndef CHECKPOINT_DCP_PLACE_READER_H_
#define CHECKPOINT_DCP_PLACE_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/torch_archive/zip_reader.h"

namespace fsdp::checkpoint {

// The file of one place is open at a time: go by files. Thread-compatible.
class PlaceReader {
 public:
  // All outlive it. `names`: DcpMetadata::files.
  PlaceReader(FileSystem& files, const std::string& folder,
              const std::vector<std::string>& names)
      : files_(files), folder_(folder), names_(names) {}

  // Makes the file of `place` the open one. InvalidArgument: it ends before the
  // place does, at which `what` should be.
  absl::Status Open(const DcpPlace& place, absl::string_view what);

  // Of the open file, as long as this lives and it is open.
  const std::string& name() const;
  int64_t bytes() const { return open_bytes_; }
  ReadAt read() const;
  // With its path in front.
  absl::Status InFile(const absl::Status& status) const;

 private:
  FileSystem& files_;
  const std::string& folder_;
  const std::vector<std::string>& names_;
  std::unique_ptr<File> open_;
  int open_number_ = -1;
  int64_t open_bytes_ = 0;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_PLACE_READER_H_
