// Names that are paths: their parts, and which names may become paths. Those
// that come out of a file, or from a user, cannot be trusted. Who asks for more
// than this asks for this first.
#ifndef CHECKPOINT_FILES_FILE_NAMES_H_
#define CHECKPOINT_FILES_FILE_NAMES_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

// InvalidArgument for anything but the name of a file right in a folder: empty,
// "." or "..", with '/', '\' or NUL, longer than 255 bytes.
absl::Status CheckPlainFileName(absl::string_view name);

// The same for each part of a path, which leads to no place outside of the
// folder that it is relative to.
absl::Status CheckRelativePath(absl::string_view path);

// "optimizer/" and "exp_avg" of "optimizer/exp_avg": two parts of `path` that
// are all of it. The first is empty for a name right in its folder.
absl::string_view FolderPart(absl::string_view path);
absl::string_view LastPart(absl::string_view path);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_FILE_NAMES_H_
