#include "checkpoint/dcp/place_reader.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

const std::string& PlaceReader::name() const {
  return names_[static_cast<size_t>(open_number_)];
}

ReadAt PlaceReader::read() const {
  return [file = open_.get()](int64_t offset, absl::Span<char> bytes) {
    return file->PRead(offset, bytes);
  };
}

absl::Status PlaceReader::InFile(const absl::Status& status) const {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(JoinPath(folder_, name()),
                                                  ": ", status.message()));
}

absl::Status PlaceReader::Open(const DcpPlace& place, absl::string_view what) {
  if (place.file != open_number_) {
    const std::string path =
        JoinPath(folder_, names_[static_cast<size_t>(place.file)]);
    open_number_ = -1;
    FSDP_ASSIGN_OR_RETURN(open_, files_.OpenForReading(path, Caching::kCached));
    FSDP_ASSIGN_OR_RETURN(open_bytes_, open_->Size());
    open_number_ = place.file;
  }
  // What is read is bounded by what is there.
  if (place.length <= open_bytes_ &&
      place.offset <= open_bytes_ - place.length) {
    return absl::OkStatus();
  }
  return InFile(absl::InvalidArgumentError(absl::StrCat(
      "has ", open_bytes_, " bytes, but ", what, " is in ", place.length,
      " from byte ", place.offset, " on: the file is cut off; copy it again")));
}

}  // namespace fsdp::checkpoint
