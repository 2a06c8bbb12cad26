// The program, which runs commands by name, and what the folder of a run has:
// checkpoint ls FOLDER, checkpoint verify PATH.
#ifndef TOOLS_CHECKPOINT_TOOL_H_
#define TOOLS_CHECKPOINT_TOOL_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::tool {

// Called now and then while much is read. May be null.
using OnBytes = std::function<void(int64_t done, int64_t total)>;

// Returns "1.23 GB", for example.
std::string SizeText(int64_t bytes);

// Returns whether a folder with these names is one of a run's checkpoints.
bool IsRunFolder(const std::vector<std::string>& names);

// Returns a table of a run's checkpoints, with damaged and unfinished ones.
// Reads no tensors. InvalidArgument: the folder is none of a run.
absl::StatusOr<std::string> List(FileSystem& files, const std::string& root);

struct VerifyResult {
  int64_t problems = 0;
  std::string text;  // all of them, by checkpoint
};

// Reads every byte of a checkpoint, or of all checkpoints of a run, and
// compares it with the manifest. NotFound: the path has no checkpoint.
absl::StatusOr<VerifyResult> Verify(FileSystem& files, const std::string& path,
                                    const OnBytes& progress);

struct Console {
  std::ostream& out;
  std::ostream& err;
  bool progress = false;  // on `err`
};

// The exit codes of the program.
inline constexpr int kFine = 0;
inline constexpr int kFound = 1;  // verify: problems
inline constexpr int kFailed = 2;

// Runs the command of `words`, the arguments behind the program's name, and
// returns the exit code.
int RunTool(FileSystem& files, const std::vector<std::string>& words,
            Console console);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TOOL_H_
