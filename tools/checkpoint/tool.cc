#include "tools/checkpoint/tool.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/format/tensor_info.h"
#include "checkpoint/load/source_folder.h"

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

// Returns whether a folder with these names is one of a run's checkpoints.
bool IsRunFolder(const std::vector<std::string>& names) {
  return absl::c_any_of(names, [](const std::string& name) {
    return name == kMarkerName || ParseStepName(name).has_value();
  });
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
  paths.reserve(steps.size());
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

absl::StatusOr<std::string> CheckpointAt(FileSystem& files,
                                         const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(path));
  if (!IsRunFolder(names)) return path;
  FSDP_ASSIGN_OR_RETURN(const auto latest, LatestCheckpoint(files, path));
  if (latest.has_value()) return latest->path;
  return absl::NotFoundError(absl::StrCat(
      path, " has no checkpoint that is whole: see checkpoint ls"));
}

// Where the files have the bytes of a tensor.
absl::StatusOr<std::vector<FileRun>> RunsOfAll(const StoredTensor& tensor) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
  if (ItemBytes(tensor.info.dtype) > 0) return RunsOf(tensor, 0, numel);
  // Elements that do not fill bytes are in one box.
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(tensor.info));
  std::vector<FileRun> runs;
  for (const StoredBox& box : tensor.boxes) {
    runs.push_back({{box.file, box.offset, bytes}, 0});
  }
  return runs;
}

absl::Status WriteFiles(const Catalog& catalog, const FilePlan& plan,
                        const OnBytes& progress, RangeReader& reader,
                        RangeWriter& writer) {
  int64_t all = 0;
  for (const FilePlace& place : plan.tensors) all += place.bytes;
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const auto file = static_cast<int64_t>(i);
    FSDP_RETURN_IF_ERROR(writer.SetSize(file, plan.files[i].bytes));
    FSDP_RETURN_IF_ERROR(writer.WriteBytes(file, 0, plan.files[i].header));
  }
  int64_t done = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const FilePlace& place = plan.tensors[i];
    FSDP_ASSIGN_OR_RETURN(const auto runs, RunsOfAll(catalog.tensors()[i]));
    const std::vector<FilePlace> ranges(runs.begin(), runs.end());
    FSDP_RETURN_IF_ERROR(reader.Read(
        ranges,
        [&](size_t range, int64_t position,
            absl::Span<const char> bytes) -> absl::Status {
          FSDP_RETURN_IF_ERROR(writer.WriteBytes(
              place.file, place.offset + runs[range].target + position,
              absl::string_view(bytes.data(), bytes.size())));
          done += static_cast<int64_t>(bytes.size());
          if (progress) progress(done, all);
          return absl::OkStatus();
        }));
  }
  return writer.Finish().status();
}

}  // namespace

absl::StatusOr<std::string> Consolidate(FileSystem& files,
                                        const std::string& in,
                                        const std::string& out,
                                        const ConsolidateOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const std::string path, CheckpointAt(files, in));
  std::optional<SumsByName> sums;
  FSDP_ASSIGN_OR_RETURN(const bool has_manifest,
                        Exists(files, JoinPath(path, kManifestName)));
  if (has_manifest) {
    FSDP_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(files, path));
    sums = std::move(manifest.files);
  }
  const SourceFolder folder(files, path, std::move(sums));
  FSDP_ASSIGN_OR_RETURN(const Catalog catalog, has_manifest
                                                   ? folder.ReadStem("model")
                                                   : folder.ReadModel());
  const bool has_pieces =
      absl::c_any_of(catalog.files(),
                     [](const NamedSize& file) {
                       return absl::StartsWith(file.name, "shard-");
                     }) ||
      absl::c_any_of(catalog.tensors(), [](const StoredTensor& tensor) {
        return tensor.boxes.size() > 1;
      });
  if (!has_pieces) {
    return absl::InvalidArgumentError(
        absl::StrCat(path,
                     " has no files of single ranks, and is read as it is; "
                     "tools/interop/dcp.py model casts and splits"));
  }
  std::vector<TensorInfo> infos;
  for (const StoredTensor& tensor : catalog.tensors()) {
    infos.push_back(tensor.info);
  }
  FSDP_ASSIGN_OR_RETURN(const FilePlan plan,
                        PlanFiles(infos, "model", options.max_file_bytes));
  int64_t bytes = 0;
  NewFolder output(files, out);
  std::vector<std::string> paths;
  for (const PlannedFile& file : plan.files) {
    bytes += file.bytes;
    paths.push_back(JoinPath(output.incomplete(), file.name));
  }
  // What a killed program has left there makes room first.
  FSDP_RETURN_IF_ERROR(output.Claim("writes a model"));
  FSDP_ASSIGN_OR_RETURN(const int64_t space,
                        files.FreeBytes(FolderOf(output.path())));
  if (space < bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        output.path(), " will have ", SizeText(bytes), ", and the disk has ",
        SizeText(space), ": free space there or choose another folder"));
  }
  RangeReaderOptions reading;
  reading.advice = "take another checkpoint";
  FSDP_ASSIGN_OR_RETURN(const auto reader, folder.Open({&catalog}, reading));
  FSDP_ASSIGN_OR_RETURN(const auto writer,
                        RangeWriter::Create(files, paths, {}));
  FSDP_RETURN_IF_ERROR(
      WriteFiles(catalog, plan, options.progress, *reader, *writer));
  FSDP_RETURN_IF_ERROR(output.Commit());
  const size_t num_files = plan.files.size();
  return absl::StrCat(out, ": tensors ", infos.size(), ", files ",
                      num_files > 1 ? num_files - 1 : 1,  // without the index
                      ", ", SizeText(bytes), "\n");
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
    FSDP_ASSIGN_OR_RETURN(const auto result, Verify(files, words[1], progress));
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
