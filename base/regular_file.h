// Files to read that have to be files: a FIFO would wait for whoever writes to
// it, and a device may never end.
#ifndef BASE_REGULAR_FILE_H_
#define BASE_REGULAR_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace fsdp {

// open(2), which waits for nobody here. -1 and an errno: EISDIR for a folder,
// ENXIO for anything else that is no regular file.
int OpenRegularFile(const std::string& path, int flags);
// To read it. Errors name `path`; InvalidArgument: it is no regular file.
absl::StatusOr<int> OpenToRead(const std::string& path);
// All of it. InvalidArgument also for more than a GiB.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path);

}  // namespace fsdp

#endif  // BASE_REGULAR_FILE_H_
