// What is said when the operating system refuses something about a file.
#ifndef CHECKPOINT_FILES_FILE_ERROR_H_
#define CHECKPOINT_FILES_FILE_ERROR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

// "`what` `path`: " (write, open, ...), the text of `error`, an errno, and what
// to do. NotFound, PermissionDenied (also for what is mounted read-only),
// ResourceExhausted (no space, a quota, a limit), AlreadyExists,
// FailedPrecondition (a folder that is not empty, a file in place of a folder),
// InvalidArgument, and Unavailable for all else.
absl::Status FileError(int error, absl::string_view what,
                       absl::string_view path);

// DataLoss: `path` ends after `found` of the `wanted` bytes from `offset` on.
absl::Status EndsEarly(absl::string_view path, int64_t offset, int64_t wanted,
                       int64_t found);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_FILE_ERROR_H_
