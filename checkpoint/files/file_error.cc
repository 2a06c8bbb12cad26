#include "checkpoint/files/file_error.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace fsdp::checkpoint {
namespace {

struct Advice {
  absl::StatusCode code;
  absl::string_view text;
};

Advice AdviceOn(int error) {
  using Code = absl::StatusCode;
  switch (error) {
    case ENOENT:
      return {Code::kNotFound, "check the path"};
    case EACCES:
    case EPERM:
      return {Code::kPermissionDenied,
              "give this user the right to it or choose another folder"};
    case EROFS:
      return {Code::kPermissionDenied,
              "mount it for writing or choose another folder"};
    case ENOSPC:
    case EDQUOT:
      return {Code::kResourceExhausted,
              "free space there or choose another folder"};
    case EFBIG:
      return {Code::kResourceExhausted,
              "raise the limit on the size of files (ulimit -f)"};
    case EMFILE:
    case ENFILE:
      return {Code::kResourceExhausted,
              "raise the limit on open files (ulimit -n)"};
    case EEXIST:
      return {Code::kAlreadyExists, "choose another name"};
    case ENOTEMPTY:
      return {Code::kFailedPrecondition, "somebody else writes there; see who"};
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENXIO:
      return {Code::kFailedPrecondition, "see what is there; name another"};
    case EINVAL:
    case ENAMETOOLONG:
      return {Code::kInvalidArgument, "choose another name"};
    default:
      return {Code::kUnavailable,
              "the system's log says more about the device"};
  }
}

}  // namespace

absl::Status FileError(int error, absl::string_view what,
                       absl::string_view path) {
  const Advice advice = AdviceOn(error);
  // So say the system and OpenRegularFile() of FIFOs, sockets and devices.
  const absl::string_view why =
      error == ENXIO ? "it is no regular file" : std::strerror(error);
  return absl::Status(
      advice.code, absl::StrCat(what, " ", path, ": ", why, "; ", advice.text));
}

absl::Status EndsEarly(absl::string_view path, int64_t offset, int64_t wanted,
                       int64_t found) {
  return absl::DataLossError(absl::StrCat(
      "read ", path, ": it ends after ", found, " of the ", wanted,
      " bytes from byte ", offset, " on; somebody has cut it off"));
}

}  // namespace fsdp::checkpoint
