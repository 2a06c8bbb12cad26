// checkpoint ls FOLDER.
#ifndef TOOLS_CHECKPOINT_LS_H_
#define TOOLS_CHECKPOINT_LS_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::tool {

// When a file or folder was changed; nothing where that is not known.
using ModifiedAt =
    std::function<std::optional<absl::Time>(const std::string& path)>;

// The checkpoints of a run as a table, with what is damaged or not finished; of
// anything else, what it is. Reads no tensors. Errors as those of OpenSource().
absl::StatusOr<std::string> List(FileSystem& files, const std::string& path,
                                 const ModifiedAt& modified_at);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_LS_H_
