// checkpoint consolidate FOLDER OUT.
#ifndef TOOLS_CHECKPOINT_CONSOLIDATE_H_
#define TOOLS_CHECKPOINT_CONSOLIDATE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/files/file_system.h"
#include "tools/checkpoint/tool.h"

namespace fsdp::checkpoint::tool {

struct ConsolidateOptions {
  int64_t max_file_bytes = 5'000'000'000;  // of tensors in one file
  OnBytes progress;                        // counts the bytes read
};

// Writes the pieces that ranks have saved in `in`, a checkpoint, a run (of
// which it takes the latest) or a folder of torch.distributed.checkpoint, as a
// Hugging Face model `out`, which appears when it is whole. No tensor is in
// memory as a whole. Returns what was written. Errors: InvalidArgument if there
// are no such pieces; NotFound if the run has no checkpoint; ResourceExhausted,
// before anything is written, if the disk has too little space; those of
// SourceFolder, NewPath, RangeReader and RangeWriter.
absl::StatusOr<std::string> Consolidate(FileSystem& files,
                                        const std::string& in,
                                        const std::string& out,
                                        const ConsolidateOptions& options);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_CONSOLIDATE_H_
