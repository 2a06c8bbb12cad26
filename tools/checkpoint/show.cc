#include "tools/checkpoint/show.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/tensor/tensor_info.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/tensor_figures.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr size_t kFirstValues = 8;
constexpr size_t kNamesListed = 8;

struct Total {
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

absl::StatusOr<std::map<Dtype, Total>> TotalsOf(const Catalog& catalog) {
  std::map<Dtype, Total> totals;
  for (const StoredTensor& tensor : catalog.tensors()) {
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
    FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(tensor.info));
    Total& total = totals[tensor.info.dtype];
    ++total.tensors;
    total.elements += numel;
    total.bytes += bytes;
  }
  return totals;
}

std::string FilesText(const Source& source) {
  std::vector<std::vector<std::string>> rows;
  int64_t all = 0;
  const auto add = [&](const std::string& name, int64_t bytes) {
    rows.push_back({Printable(name), SizeText(bytes)});
    all += bytes;
  };
  if (source.manifest.has_value()) {
    for (const auto& [name, sums] : source.manifest->files) {
      add(name, sums.bytes);
    }
  } else {
    for (const StoredFile& file : source.catalog.files()) {
      add(file.name, file.bytes);
    }
  }
  return absl::StrCat(Count(static_cast<int64_t>(rows.size()), "file"), ", ",
                      SizeText(all), "\n", Columns(rows, "lr"));
}

absl::StatusOr<std::string> TotalsText(const Catalog& catalog) {
  FSDP_ASSIGN_OR_RETURN(const auto totals, TotalsOf(catalog));
  std::vector<std::vector<std::string>> rows;
  Total all;
  const auto add = [&rows](absl::string_view name, const Total& total) {
    rows.push_back({std::string(name), Count(total.tensors, "tensor"),
                    Count(total.elements, "element"), SizeText(total.bytes)});
  };
  for (const auto& [dtype, total] : totals) {
    add(NameOf(dtype), total);
    all.tensors += total.tensors;
    all.elements += total.elements;
    all.bytes += total.bytes;
  }
  if (totals.size() != 1) add("all", all);
  return absl::StrCat("tensors\n", Columns(rows, "lrrr"));
}

std::string PlaceText(const Catalog& catalog, const StoredTensor& tensor) {
  std::set<int> files;
  for (const StoredBox& box : tensor.boxes) files.insert(box.file);
  if (files.empty()) return "";
  std::string text = Printable(catalog.files()[*files.begin()].name);
  if (files.size() > 1) {
    absl::StrAppend(&text, " and ", files.size() - 1, " more");
  }
  if (tensor.boxes.size() > 1) {
    absl::StrAppend(&text, ", in ", tensor.boxes.size(), " pieces");
  }
  return text;
}

absl::StatusOr<std::string> TensorsText(const Catalog& catalog) {
  std::vector<std::vector<std::string>> rows;
  for (const StoredTensor& tensor : catalog.tensors()) {
    FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(tensor.info));
    rows.push_back({Printable(tensor.info.name), ToString(tensor.info),
                    SizeText(bytes), PlaceText(catalog, tensor)});
  }
  return Columns(rows, "llrl");
}

absl::Status NoSuchTensor(const Source& source, const std::string& name) {
  std::vector<std::string> alike;
  for (const StoredTensor& tensor : source.catalog.tensors()) {
    if (alike.size() == kNamesListed) break;
    if (absl::StrContains(tensor.info.name, name)) {
      alike.push_back(Printable(tensor.info.name));
    }
  }
  return absl::NotFoundError(absl::StrCat(
      source.path, " has no tensor \"", Printable(name), "\"",
      alike.empty()
          ? "; --tensors lists those it has"
          : absl::StrCat("; did you mean ", absl::StrJoin(alike, ", "), "?")));
}

std::string FiguresText(const TensorFigures& figures) {
  std::vector<std::vector<std::string>> rows;
  if (figures.finite > 0) {
    rows = {{"min", NumberText(figures.min)},
            {"max", NumberText(figures.max)},
            {"mean", NumberText(figures.Mean())},
            {"norm", NumberText(figures.Norm())}};
  }
  rows.push_back({"zeros", Thousands(figures.zeros)});
  rows.push_back({"NaN", Thousands(figures.nans)});
  rows.push_back({"Inf", Thousands(figures.infinities)});
  return Columns(rows, "ll");
}

}  // namespace

absl::StatusOr<std::string> Show(const Source& source, bool tensors) {
  FSDP_ASSIGN_OR_RETURN(const std::string totals, TotalsText(source.catalog));
  std::string text =
      absl::StrCat(Printable(source.path), ": ", NameOf(source.format),
                   source.manifest.has_value()
                       ? absl::StrCat(" of step ", source.manifest->step)
                       : "",
                   "\n", FilesText(source), totals);
  if (tensors) {
    FSDP_ASSIGN_OR_RETURN(const std::string list, TensorsText(source.catalog));
    absl::StrAppend(&text, list);
  }
  return text;
}

absl::StatusOr<std::string> ShowTensor(const Source& source,
                                       const std::string& name,
                                       const OnBytes& progress) {
  const StoredTensor* const tensor = source.catalog.Find(name);
  if (tensor == nullptr) return NoSuchTensor(source, name);
  const Dtype dtype = tensor->info.dtype;
  FSDP_ASSIGN_OR_RETURN(const int64_t total, BytesOf(tensor->info));
  FSDP_ASSIGN_OR_RETURN(const auto reader, ReaderOf(source));
  TensorFigures figures;
  std::string first;
  std::vector<double> numbers;
  int64_t done = 0;
  const size_t item = std::max<size_t>(1, ItemBytes(dtype));
  FSDP_RETURN_IF_ERROR(
      StreamTensor(*reader, *tensor, [&](absl::Span<const char> bytes) {
        const size_t wanted = kFirstValues * item - first.size();
        first.append(bytes.data(), std::min(wanted, bytes.size()));
        if (IsNumber(dtype)) {
          numbers.clear();
          AppendNumbers(dtype, bytes, numbers);
          figures.Add(numbers);
        }
        done += static_cast<int64_t>(bytes.size());
        if (progress) progress(done, total);
        return absl::OkStatus();
      }));
  std::vector<std::string> values;
  for (size_t at = 0; at < first.size(); at += item) {
    values.push_back(ElementText(dtype, first.substr(at, item)));
  }
  return absl::StrCat(
      Printable(name), "  ", ToString(tensor->info), "  ", SizeText(total),
      "  ", PlaceText(source.catalog, *tensor), "\n",
      IsNumber(dtype) ? FiguresText(figures) : "",
      "first values: ", values.empty() ? "none" : absl::StrJoin(values, ", "),
      "\n");
}

namespace {

struct Size {
  int64_t files = 0;
  int64_t bytes = 0;
};

// Of what is in a folder and the folders in it.
absl::Status AddSize(FileSystem& files, const std::string& folder, int depth,
                     Size& size) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files.List(folder));
  for (const std::string& name : names) {
    const std::string path = JoinPath(folder, name);
    const absl::StatusOr<FileInfo> info = files.Stat(path);
    // A run may be at work here.
    if (absl::IsNotFound(info.status())) continue;
    FSDP_RETURN_IF_ERROR(info.status());
    if (info->kind == FileInfo::Kind::kFolder && depth == 0) {
      FSDP_RETURN_IF_ERROR(AddSize(files, path, depth + 1, size));
    } else {
      ++size.files;
      size.bytes += info->bytes;
    }
  }
  return absl::OkStatus();
}

// What a run's folder says of all.
struct RunState {
  bool by_manifest = false;
  std::optional<int64_t> latest;
};

constexpr char kIncomplete[] =
    "incomplete: being written, or left by a run that ended";

std::string MarkOf(FileSystem& files, const std::string& path,
                   const StepFolder& folder, const RunState& run) {
  switch (folder.stage) {
    case Stage::kIncomplete:
      return kIncomplete;
    case Stage::kDeleted:
      return "partly removed: the next run removes the rest";
    case Stage::kReplaced:
      return "replaced by one of the same step";
    case Stage::kCommitted:
      break;
  }
  const absl::Status manifest = ReadManifest(files, path).status();
  if (run.by_manifest && absl::IsNotFound(manifest)) return kIncomplete;
  if (!manifest.ok()) return absl::StrCat("damaged: ", manifest.message());
  return run.latest == folder.step ? "latest" : "";
}

std::string TimeText(const std::optional<absl::Time>& time) {
  if (!time.has_value()) return "?";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", *time, absl::LocalTimeZone());
}

absl::StatusOr<std::string> ListRun(FileSystem& files, const std::string& root,
                                    const std::vector<std::string>& names,
                                    const ModifiedAt& modified_at) {
  FSDP_ASSIGN_OR_RETURN(const auto latest, LatestCheckpoint(files, root));
  RunState run;
  run.by_manifest = IsByManifest(names);
  if (latest.has_value()) run.latest = latest->step;
  std::vector<std::pair<StepFolder, std::string>> folders;
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (folder.has_value()) folders.emplace_back(*folder, name);
  }
  std::sort(folders.begin(), folders.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first.step, a.first.stage) <
           std::make_pair(b.first.step, b.first.stage);
  });
  std::vector<std::vector<std::string>> rows = {
      {"step", "files", "size", "written", ""}};
  for (const auto& [folder, name] : folders) {
    const std::string path = JoinPath(root, name);
    Size size;
    FSDP_RETURN_IF_ERROR(AddSize(files, path, 0, size));
    const bool is_whole = folder.stage == Stage::kCommitted;
    rows.push_back(
        {absl::StrCat(folder.step), Thousands(size.files), SizeText(size.bytes),
         TimeText(modified_at(is_whole ? JoinPath(path, kManifestName) : path)),
         MarkOf(files, path, folder, run)});
  }
  return absl::StrCat(
      Printable(root), ": checkpoints of a run\n",
      folders.empty() ? "  none yet\n" : Columns(rows, "rrrll"));
}

}  // namespace

absl::StatusOr<std::string> List(FileSystem& files, const std::string& path,
                                 const ModifiedAt& modified_at) {
  FSDP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(files, path));
  if (is_folder) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                          files.List(path));
    if (IsRunFolder(names)) return ListRun(files, path, names, modified_at);
  }
  FSDP_ASSIGN_OR_RETURN(const Source source, OpenSource(files, path));
  int64_t bytes = 0;
  for (const StoredFile& file : source.catalog.files()) bytes += file.bytes;
  const Catalog& catalog = source.catalog;
  return absl::StrCat(
      Printable(path), ": ", NameOf(source.format),
      source.manifest.has_value()
          ? absl::StrCat(" of step ", source.manifest->step)
          : "",
      ", ", Count(static_cast<int64_t>(catalog.tensors().size()), "tensor"),
      " in ", Count(static_cast<int64_t>(catalog.files().size()), "file"), ", ",
      SizeText(bytes), "\n");
}

}  // namespace fsdp::checkpoint::tool
