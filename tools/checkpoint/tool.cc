#include "tools/checkpoint/tool.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tools/checkpoint/consolidate.h"
#include "tools/checkpoint/runs.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr char kHelp[] =
    "checkpoint ls FOLDER\n"
    "  lists the checkpoints of a run\n"
    "checkpoint verify PATH\n"
    "  reads all of a checkpoint, or of all of a run, and compares it with "
    "the\n"
    "  manifest's checksums; ends with 1 where there is a problem\n"
    "checkpoint consolidate FOLDER OUT [MAX_FILE_BYTES]\n"
    "  makes one Hugging Face model of the safetensors files of single ranks,\n"
    "  in files of at most MAX_FILE_BYTES of tensors; default: 5000000000\n"
    "Ends with 2 after an error.\n";

absl::StatusOr<int> Run(FileSystem& files,
                        const std::vector<std::string>& words,
                        const OnBytes& progress, Console& console) {
  const std::string command = words.empty() ? "--help" : words[0];
  if (command == "--help" || command == "help") {
    console.out << kHelp;
    return kFine;
  }
  if (command == "ls" && words.size() == 2) {
    FSDP_ASSIGN_OR_RETURN(const std::string text, List(files, words[1]));
    console.out << text;
    return kFine;
  }
  if (command == "verify" && words.size() == 2) {
    FSDP_ASSIGN_OR_RETURN(const VerifyResult result,
                          Verify(files, words[1], progress));
    console.out << result.text;
    return result.problems == 0 ? kFine : kFound;
  }
  if (command == "consolidate" && (words.size() == 3 || words.size() == 4)) {
    ConsolidateOptions options;
    options.progress = progress;
    if (words.size() == 4 &&
        (!absl::SimpleAtoi(words[3], &options.max_file_bytes) ||
         options.max_file_bytes < 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat(words[3], " is no number of bytes"));
    }
    FSDP_ASSIGN_OR_RETURN(const std::string text,
                          Consolidate(files, words[1], words[2], options));
    console.out << text;
    return kFine;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", command,
                   "\" is no command, or takes other arguments; "
                   "see checkpoint --help"));
}

}  // namespace

int RunTool(FileSystem& files, const std::vector<std::string>& words,
            Console console) {
  int64_t shown = -1;  // percent
  OnBytes progress;
  if (console.progress) {
    progress = [&](int64_t done, int64_t total) {
      const int64_t percent = total > 0 ? done * 100 / total : 100;
      if (percent == shown) return;
      shown = percent;
      console.err << "\r" << words[0] << ": " << percent << " % of "
                  << SizeText(total) << " " << std::flush;
    };
  }
  const absl::StatusOr<int> code = Run(files, words, progress, console);
  if (shown >= 0) console.err << std::endl;
  absl::Status status = code.status();
  if (status.ok() && !console.out.flush()) {
    status = absl::UnavailableError("standard output cannot be written");
  }
  if (status.ok()) return *code;
  console.err << "checkpoint: " << status.message() << std::endl;
  return kFailed;
}

}  // namespace fsdp::checkpoint::tool
