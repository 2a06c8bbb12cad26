// What the command lines of all programs here have in common.
#ifndef EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_
#define EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace llama {

// Reads the flags. --help, for which it exits, as it does for what cannot be
// parsed, says `usage` and names the flags of the source files with `file` in
// their names. InvalidArgument: an argument that is no flag.
absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        const std::string& file);

// A path as the user meant it, also under `bazel run`; an empty one stays so.
std::string ResolvePath(const std::string& path);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_
