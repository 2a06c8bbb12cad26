// checkpoint show PATH [NAME].
#ifndef TOOLS_CHECKPOINT_SHOW_H_
#define TOOLS_CHECKPOINT_SHOW_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/files/file_system.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {

// Returns files and totals, and with `tensors` every tensor. Reads only
// headers.
absl::StatusOr<std::string> Show(const Source& source, bool tensors);

// Returns figures of a tensor's values, in O(buffer) memory. NotFound suggests
// similar names.
absl::StatusOr<std::string> ShowTensor(const Source& source,
                                       const std::string& name,
                                       const OnBytes& progress);

// checkpoint ls FOLDER.

// Returns when a file or folder was changed, or nothing if that is not known.
using ModifiedAt =
    std::function<std::optional<absl::Time>(const std::string& path)>;

// Returns a table of a run's checkpoints, with damaged and unfinished ones; for
// other paths, what they are. Reads no tensors. Errors are those of
// OpenSource().
absl::StatusOr<std::string> List(FileSystem& files, const std::string& path,
                                 const ModifiedAt& modified_at);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_SHOW_H_
