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

// Files and totals; with `tensors`, every tensor. Reads headers alone.
absl::StatusOr<std::string> Show(const Source& source, bool tensors);

// What a tensor's values are, in O(buffer) memory. NotFound, with names that
// are like it.
absl::StatusOr<std::string> ShowTensor(const Source& source,
                                       const std::string& name,
                                       const OnBytes& progress);

// checkpoint ls FOLDER.

// When a file or folder was changed; nothing where that is not known.
using ModifiedAt =
    std::function<std::optional<absl::Time>(const std::string& path)>;

// The checkpoints of a run as a table, with what is damaged or not finished; of
// anything else, what it is. Reads no tensors. Errors as those of OpenSource().
absl::StatusOr<std::string> List(FileSystem& files, const std::string& path,
                                 const ModifiedAt& modified_at);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_SHOW_H_
