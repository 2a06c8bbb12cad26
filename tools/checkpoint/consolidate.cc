#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/format/tensor_info.h"
#include "checkpoint/load/source_folder.h"
#include "ranges/file_place.h"
#include "tools/checkpoint/tool.h"

namespace fsdp::checkpoint::tool {
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
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const auto file = static_cast<int64_t>(i);
    FSDP_RETURN_IF_ERROR(writer.SetSize(file, plan.files[i].bytes));
    FSDP_RETURN_IF_ERROR(writer.WriteBytes(file, 0, plan.files[i].header));
  }
  int64_t done = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const PlannedTensor& place = plan.tensors[i];
    FSDP_ASSIGN_OR_RETURN(const std::vector<FileRun> runs,
                          RunsOfAll(catalog.tensors()[i]));
    const std::vector<FilePlace> ranges(runs.begin(), runs.end());
    FSDP_RETURN_IF_ERROR(reader.Read(
        ranges,
        [&](size_t range, int64_t position,
            absl::Span<const char> bytes) -> absl::Status {
          FSDP_RETURN_IF_ERROR(writer.WriteBytes(
              place.file, place.offset + runs[range].target + position,
              absl::string_view(bytes.data(), bytes.size())));
          done += static_cast<int64_t>(bytes.size());
          if (progress) progress(done, plan.total_bytes);
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
  std::optional<Manifest> manifest;
  FSDP_ASSIGN_OR_RETURN(const bool has_manifest,
                        Exists(files, JoinPath(path, kManifestName)));
  if (has_manifest) {
    FSDP_ASSIGN_OR_RETURN(manifest, ReadManifest(files, path));
  }
  const SourceFolder folder(files, path,
                            has_manifest ? &manifest->files : nullptr);
  FSDP_ASSIGN_OR_RETURN(const Catalog catalog, has_manifest
                                                   ? folder.ReadStem("model")
                                                   : folder.ReadModel());
  const bool has_pieces =
      absl::c_any_of(catalog.files(),
                     [](const StoredFile& file) {
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
  FilePlanOptions layout;
  layout.max_file_bytes = options.max_file_bytes;
  FSDP_ASSIGN_OR_RETURN(const FilePlan plan, PlanFiles(infos, layout));
  auto bytes = static_cast<int64_t>(plan.index.size());
  NewPath output(files, out, NewPath::Kind::kFolder);
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
  FSDP_ASSIGN_OR_RETURN(const auto reader, folder.Open(catalog, reading));
  FSDP_ASSIGN_OR_RETURN(const auto writer,
                        RangeWriter::Create(files, paths, {}));
  FSDP_RETURN_IF_ERROR(
      WriteFiles(catalog, plan, options.progress, *reader, *writer));
  if (!plan.index_name.empty()) {
    FSDP_RETURN_IF_ERROR(ReplaceFile(
        files, JoinPath(output.incomplete(), plan.index_name), plan.index));
  }
  FSDP_RETURN_IF_ERROR(output.Commit());
  return absl::StrCat(out, ": tensors ", infos.size(), ", files ",
                      plan.files.size(), ", ", SizeText(bytes), "\n");
}

}  // namespace fsdp::checkpoint::tool
