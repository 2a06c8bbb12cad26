#include "tools/checkpoint/tool.h"

#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "tools/checkpoint/commands.h"
#include "tools/checkpoint/consolidate.h"
#include "tools/checkpoint/diff.h"
#include "tools/checkpoint/prune.h"
#include "tools/checkpoint/show.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/text.h"
#include "tools/checkpoint/verify.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr char kProgram[] = "checkpoint";

// Of the machine's disk.
std::optional<absl::Time> ModifiedAtOf(const std::string& path) {
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return std::nullopt;
  return absl::TimeFromTimespec(found.st_mtim);
}

std::string Help() {
  std::string text =
      "checkpoint COMMAND ...: looks at checkpoints, compares and removes "
      "them.\n"
      "Ends with 0; with 1 where verify or diff has found something; with 2 "
      "after an error.\n";
  for (const CommandSpec& command : Commands()) {
    absl::StrAppend(&text, "\n", HelpOf(kProgram, command));
  }
  return text;
}

// What a command says, and how the program ends.
struct Answer {
  std::string text;
  int code = kFine;
};

class Run {
 public:
  Run(FileSystem& files, const Arguments& arguments, Console& console,
      const std::string& command)
      : files_(files), arguments_(arguments) {
    if (!console.progress && !arguments.Has("progress")) return;
    progress_ = std::make_unique<Progress>(console.err, command, absl::Now);
    on_bytes_ = [this](int64_t done, int64_t total) {
      progress_->Update(done, total);
    };
  }

  absl::StatusOr<Answer> Call(const std::string& command) {
    if (command == "ls") {
      return Say(List(files_, arguments_[0], ModifiedAtOf));
    }
    if (command == "show") return CallShow();
    if (command == "verify") return CallVerify();
    if (command == "diff") return CallDiff();
    if (command == "prune") return CallPrune();
    return CallConsolidate();
  }

 private:
  static absl::StatusOr<Answer> Say(absl::StatusOr<std::string> text) {
    FSDP_RETURN_IF_ERROR(text.status());
    return Answer{*std::move(text)};
  }

  // Whether --part is "model"; `otherwise` without the flag.
  absl::StatusOr<bool> ModelOnly(bool otherwise) const {
    const std::string part = arguments_.Text("part");
    if (!arguments_.Has("part")) return otherwise;
    if (part == "model" || part == "all") return part == "model";
    return absl::InvalidArgumentError(
        absl::StrCat("--part=", part, ": model and all are possible"));
  }

  SourceOptions Options(bool model_only) const {
    SourceOptions options;
    options.model_only = model_only;
    options.unchecked = arguments_.Has("unchecked");
    return options;
  }

  absl::StatusOr<Answer> CallShow() {
    FSDP_ASSIGN_OR_RETURN(const bool model_only, ModelOnly(false));
    FSDP_ASSIGN_OR_RETURN(const Source source, OpenSource(files_, arguments_[0],
                                                          Options(model_only)));
    if (arguments_[1].empty()) {
      return Say(Show(source, arguments_.Has("tensors")));
    }
    return Say(ShowTensor(source, arguments_[1], on_bytes_));
  }

  absl::StatusOr<Answer> CallVerify() {
    FSDP_ASSIGN_OR_RETURN(const VerifyResult result,
                          Verify(files_, arguments_[0], on_bytes_));
    return Answer{result.text, result.problems == 0 ? kFine : kFound};
  }

  absl::StatusOr<Answer> CallDiff() {
    DiffOptions options;
    options.progress = on_bytes_;
    FSDP_ASSIGN_OR_RETURN(options.top,
                          arguments_.Number("top", options.top, 0));
    FSDP_ASSIGN_OR_RETURN(bool model_only, ModelOnly(false));
    FSDP_ASSIGN_OR_RETURN(
        Source a, OpenSource(files_, arguments_[0], Options(model_only)));
    FSDP_ASSIGN_OR_RETURN(
        Source b, OpenSource(files_, arguments_[1], Options(model_only)));
    if (a.format != b.format && !arguments_.Has("part")) {
      FSDP_ASSIGN_OR_RETURN(a,
                            OpenSource(files_, arguments_[0], Options(true)));
      FSDP_ASSIGN_OR_RETURN(b,
                            OpenSource(files_, arguments_[1], Options(true)));
    }
    FSDP_ASSIGN_OR_RETURN(const DiffResult result, Diff(a, b, options));
    return Answer{result.text, result.same ? kFine : kFound};
  }

  absl::StatusOr<Answer> CallPrune() {
    PruneOptions options;
    options.dry_run = arguments_.Has("dry_run");
    options.progress = on_bytes_;
    FSDP_ASSIGN_OR_RETURN(options.keep_last,
                          arguments_.Number("keep_last", 0, 1));
    FSDP_ASSIGN_OR_RETURN(options.keep_every,
                          arguments_.Number("keep_every", 0, 1));
    return Say(Prune(files_, arguments_[0], options));
  }

  absl::StatusOr<Answer> CallConsolidate() {
    ConsolidateOptions options;
    options.unchecked = arguments_.Has("unchecked");
    options.progress = on_bytes_;
    FSDP_ASSIGN_OR_RETURN(
        options.max_file_bytes,
        arguments_.Number("max_file_bytes", options.max_file_bytes, 1));
    return Say(Consolidate(files_, arguments_[0], arguments_[1], options));
  }

  FileSystem& files_;
  const Arguments& arguments_;
  std::unique_ptr<Progress> progress_;
  OnBytes on_bytes_;  // null: nobody watches
};

absl::StatusOr<Answer> RunCommand(FileSystem& files, const CommandSpec& command,
                                  const std::vector<std::string>& words,
                                  Console& console) {
  FSDP_ASSIGN_OR_RETURN(const Arguments arguments,
                        Arguments::Parse(command, words));
  return Run(files, arguments, console, command.name).Call(command.name);
}

bool AsksForHelp(const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (word == "--") return false;
    if (word == "--help") return true;
  }
  return words.empty() || words[0] == "help";
}

int Finish(const absl::StatusOr<Answer>& answer, Console& console) {
  if (!answer.ok()) {
    console.err << kProgram << ": " << answer.status().message() << std::endl;
    return kFailed;
  }
  console.out << answer->text << std::flush;
  if (console.out) return answer->code;
  console.err << kProgram << ": standard output cannot be written" << std::endl;
  return kFailed;
}

}  // namespace

int RunTool(FileSystem& files, const std::vector<std::string>& words,
            Console console) {
  const std::string name = words.empty() ? "" : words[0];
  for (const CommandSpec& command : Commands()) {
    if (command.name != name) continue;
    if (AsksForHelp(words)) {
      return Finish(Answer{HelpOf(kProgram, command)}, console);
    }
    return Finish(
        RunCommand(files, command, {words.begin() + 1, words.end()}, console),
        console);
  }
  if (AsksForHelp(words)) return Finish(Answer{Help()}, console);
  return Finish(absl::InvalidArgumentError(absl::StrCat(
                    "\"", name, "\" is no command; see checkpoint --help")),
                console);
}

}  // namespace fsdp::checkpoint::tool
