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

// Reads every byte of a checkpoint, or of all of a run, and compares it with
// the manifest; then, whether the files have what their headers and indices
// say. Without a manifest, the latter alone, as nothing else is known. Not OK
// for a path that has no checkpoint at all.
absl::StatusOr<VerifyResult> Verify(FileSystem& files, const std::string& path,
                                    const OnBytes& progress);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_VERIFY_H_
