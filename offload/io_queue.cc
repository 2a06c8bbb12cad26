#include "offload/io_queue.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace fsdp::offload {

absl::Status ErrnoStatus(int error, absl::string_view what) {
  const std::string text = absl::StrCat(what, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT) {
    return absl::ResourceExhaustedError(
        absl::StrCat(text, "; free space there or choose another directory"));
  }
  if (error == EFBIG) {
    return absl::ResourceExhaustedError(absl::StrCat(
        text, "; raise the limit on the size of files (ulimit -f)"));
  }
  return absl::UnavailableError(
      absl::StrCat(text, "; the system's log says more about the device"));
}

absl::Status CheckMoved(const IoRequest& request, absl::string_view what,
                        absl::string_view path) {
  const bool syncs = request.kind == IoRequest::Kind::kSync;
  if (request.result == (syncs ? 0 : request.bytes)) return absl::OkStatus();
  const std::string where =
      syncs ? absl::StrCat(what, ", sync of ", path)
            : absl::StrCat(what, ", at ", request.offset, " of ", path);
  if (request.result < 0) {
    return ErrnoStatus(static_cast<int>(-request.result), where);
  }
  if (request.kind == IoRequest::Kind::kRead) {
    return absl::DataLossError(
        absl::StrCat(where, ": the file ends after ", request.result, " of ",
                     request.bytes, " bytes; somebody has cut it off"));
  }
  return absl::UnavailableError(absl::StrCat(
      where, ": only ", request.result, " of ", request.bytes,
      " bytes were written; the system's log says more about the device"));
}

}  // namespace fsdp::offload
