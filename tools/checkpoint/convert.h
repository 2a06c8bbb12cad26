// checkpoint convert IN OUT and checkpoint consolidate FOLDER OUT.
#ifndef TOOLS_CHECKPOINT_CONVERT_H_
#define TOOLS_CHECKPOINT_CONVERT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/files/file_system.h"
#include "tools/checkpoint/model_writer.h"

namespace fsdp::checkpoint::tool {

struct ConvertOptions {
  std::string to;  // "hf", "dcp" or "torch"
  WriteOptions write;
  bool unchecked = false;
};

// Writes the model of a source as `out`, in another format; says what was
// written and what was left out. InvalidArgument for another format than these;
// the errors of OpenSource() and of model_writer.h.
absl::StatusOr<std::string> Convert(FileSystem& files, const std::string& in,
                                    const std::string& out,
                                    const ConvertOptions& options);

// Writes the pieces that ranks have saved as a Hugging Face model.
// InvalidArgument for other formats.
absl::StatusOr<std::string> Consolidate(FileSystem& files,
                                        const std::string& in,
                                        const std::string& out,
                                        const ConvertOptions& options);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_CONVERT_H_
