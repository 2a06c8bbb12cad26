#include "tools/checkpoint/tool.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr char kIncomplete[] =
    "incomplete: being written, or left by a run that ended";

// Its size and what is to be said of it.
std::pair<std::string, std::string> Describe(FileSystem& files,
                                             const std::string& path,
                                             Stage stage, bool by_manifest) {
  switch (stage) {
    case Stage::kIncomplete:
      return {"?", kIncomplete};
    case Stage::kDeleted:
      return {"?", "partly removed: the next run removes the rest"};
    case Stage::kReplaced:
      return {"?", "replaced by one of the same step"};
    case Stage::kCommitted:
      break;
  }
  const absl::StatusOr<Manifest> manifest = ReadManifest(files, path);
  if (by_manifest && absl::IsNotFound(manifest.status())) {
    return {"?", kIncomplete};
  }
  if (!manifest.ok()) {
    return {"?", absl::StrCat("damaged: ", manifest.status().message())};
  }
  int64_t bytes = 0;
  for (const auto& [name, sums] : manifest->files) bytes += sums.bytes;
  return {SizeText(bytes), ""};
}

// The checkpoints that `path` is, or has. Where a name alone commits one, it
// may have lost its manifest.
absl::StatusOr<std::vector<std::string>> CheckpointsOf(
    FileSystem& files, const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(path));
  if (!IsRunFolder(names)) {
    FSDP_ASSIGN_OR_RETURN(const bool has_manifest,
                          Exists(files, JoinPath(path, kManifestName)));
    if (has_manifest) return std::vector<std::string>{path};
    return absl::NotFoundError(absl::StrCat(path, " has no ", kManifestName,
                                            ", which has the checksums"));
  }
  std::vector<int64_t> steps;
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (!folder.has_value() || folder->stage != Stage::kCommitted) continue;
    FSDP_ASSIGN_OR_RETURN(
        const bool has_manifest,
        Exists(files, JoinPath(JoinPath(path, name), kManifestName)));
    if (has_manifest || !IsByManifest(names)) steps.push_back(folder->step);
  }
  if (steps.empty()) {
    return absl::NotFoundError(absl::StrCat(path, " has no checkpoint"));
  }
  std::sort(steps.begin(), steps.end());
  std::vector<std::string> paths;
  for (const int64_t step : steps) paths.push_back(StepPath(path, step));
  return paths;
}

}  // namespace

std::string SizeText(int64_t bytes) {
  constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return absl::StrCat(bytes, " B");
  double size = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  for (; size >= 999.995 && unit + 1 < std::size(kUnits); ++unit) size /= 1000;
  return absl::StrFormat("%.2f %s", size, kUnits[unit]);
}

bool IsRunFolder(const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name == kMarkerName || ParseStepName(name).has_value();
  });
}

absl::StatusOr<std::string> List(FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  if (!IsRunFolder(names)) {
    return absl::InvalidArgumentError(
        absl::StrCat(root, " is not the folder of a run's checkpoints"));
  }
  FSDP_ASSIGN_OR_RETURN(const auto latest, LatestCheckpoint(files, root));
  std::vector<std::pair<StepFolder, std::string>> folders;
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (folder.has_value()) folders.emplace_back(*folder, JoinPath(root, name));
  }
  std::sort(folders.begin(), folders.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first.step, a.first.stage) <
           std::make_pair(b.first.step, b.first.stage);
  });
  std::string text = absl::StrFormat("%12s  %10s\n", "step", "size");
  for (const auto& [folder, path] : folders) {
    auto [size, mark] =
        Describe(files, path, folder.stage, IsByManifest(names));
    if (mark.empty() && latest.has_value() && path == latest->path) {
      mark = "latest";
    }
    absl::StrAppendFormat(&text, "%12d  %10s%s%s\n", folder.step, size,
                          mark.empty() ? "" : "  ",
                          absl::Utf8SafeCHexEscape(mark));
  }
  return text;
}

absl::StatusOr<VerifyResult> Verify(FileSystem& files, const std::string& path,
                                    const OnBytes& progress) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> checkpoints,
                        CheckpointsOf(files, path));
  VerifyResult result;
  for (const std::string& checkpoint : checkpoints) {
    absl::StrAppend(&result.text, checkpoint, "\n");
    const absl::StatusOr<Manifest> manifest = ReadManifest(files, checkpoint);
    std::vector<Problem> problems;
    if (manifest.ok()) {
      FSDP_ASSIGN_OR_RETURN(
          problems, VerifyFiles(files, checkpoint, *manifest, progress));
    } else {
      problems.emplace_back().text = std::string(manifest.status().message());
    }
    for (const Problem& problem : problems) {
      ++result.problems;
      absl::StrAppend(&result.text, "  ",
                      absl::Utf8SafeCHexEscape(problem.text), "\n");
    }
  }
  absl::StrAppend(&result.text,
                  result.problems == 0
                      ? "sound"
                      : absl::StrCat(result.problems, " problem",
                                     result.problems == 1 ? "" : "s"),
                  "\n");
  return result;
}

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
