// checkpoint show PATH [NAME].
#ifndef TOOLS_CHECKPOINT_SHOW_H_
#define TOOLS_CHECKPOINT_SHOW_H_

#include <string>

#include "absl/status/statusor.h"
#include "tools/checkpoint/progress.h"
#include "tools/checkpoint/source.h"

namespace fsdp::checkpoint::tool {

// Files and totals; with `tensors`, every tensor. Reads headers alone.
absl::StatusOr<std::string> Show(const Source& source, bool tensors);

// What a tensor's values are, in O(buffer) memory. NotFound, with names that
// are like it.
absl::StatusOr<std::string> ShowTensor(const Source& source,
                                       const std::string& name,
                                       const OnBytes& progress);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_SHOW_H_
