// checkpoint verify PATH.
#ifndef TOOLS_CHECKPOINT_VERIFY_H_
#define TOOLS_CHECKPOINT_VERIFY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/files/file_system.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {

struct VerifyResult {
  int64_t problems = 0;
  std::string text;  // all of them, by checkpoint
};

// Reads every byte of a checkpoint, or of all checkpoints of a run, compares it
// with the manifest, and checks whether files have what their headers and
// indices say. Without a manifest only the latter is checked. It is an error if
// the path has no checkpoint at all.
absl::StatusOr<VerifyResult> Verify(FileSystem& files, const std::string& path,
                                    const OnBytes& progress);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_VERIFY_H_
