// The program, which runs commands by name, and what the folder of a run has:
// checkpoint ls FOLDER, checkpoint verify PATH, checkpoint consolidate FOLDER
// OUT.
#ifndef TOOLS_CHECKPOINT_TOOL_H_
#define TOOLS_CHECKPOINT_TOOL_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/files/file_system.h"

namespace fsdp::checkpoint::tool {

// Called now and then while much is read. May be null.
using OnBytes = std::function<void(int64_t done, int64_t total)>;

// Returns "1.23 GB", for example.
std::string SizeText(int64_t bytes);

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
// SourceFolder, NewFolder, RangeReader and RangeWriter.
absl::StatusOr<std::string> Consolidate(FileSystem& files,
                                        const std::string& in,
                                        const std::string& out,
                                        const ConsolidateOptions& options);

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
