#include "checkpoint/model_files.h"

#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/files/file_system.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "checkpoint/save/save_plan.h"
#include "fsdp/deferred/deferred_init.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLoading[] = "loading a model";
constexpr char kExporting[] = "exporting a model";

// Opens the folder of `path`, which is a folder or a file in it, and reads
// which tensors are there. A file of one of our checkpoints is read with its
// checksums.
absl::StatusOr<Catalog> OpenSource(FileSystem& files, const std::string& path,
                                   std::optional<SourceFolder>& folder) {
  FSDP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(files, path));
  const std::string root = is_folder ? path : FolderOf(path);
  FSDP_ASSIGN_OR_RETURN(const bool is_checkpoint,
                        Exists(files, JoinPath(root, kTrainingName)));
  FSDP_ASSIGN_OR_RETURN(const bool has_manifest,
                        Exists(files, JoinPath(root, kManifestName)));
  std::optional<SumsByName> sums;
  const bool is_ours = is_checkpoint && has_manifest;
  if (is_ours) {
    FSDP_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(files, root));
    sums = std::move(manifest.files);
  }
  folder.emplace(files, root, std::move(sums));
  if (!is_folder) return folder->ReadFileOrIndex(std::string(LastPart(path)));
  // There may be an average of the model's weights, too.
  return is_ours ? folder->ReadStem("model") : folder->ReadModel();
}

absl::Status CheckBeforeExport(const RunValues& values,
                               const ExportOptions& options) {
  FSDP_RETURN_IF_ERROR(values.CheckLoaded());
  FSDP_RETURN_IF_ERROR(CheckPlainFileName(options.stem));
  for (const auto& [name, text] : options.texts) {
    FSDP_RETURN_IF_ERROR(CheckTextName("ExportOptions::texts", name));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LoadModel(const std::string& path, torch::nn::Module& module,
                       const LoadModelOptions& options) {
  const NormalMode normal;
  const Together together{RanksOf(module), options.timeout};
  std::optional<RunValues> values;
  std::optional<SourceFolder> folder;
  Catalog catalog;
  LoadPlan plan;
  std::unique_ptr<RangeReader> reader;
  const auto make_plan = [&]() -> absl::Status {
    if (together.ranks == nullptr) FSDP_RETURN_IF_ERROR(Materialize(module));
    FSDP_ASSIGN_OR_RETURN(values, RunValues::ReadModel(&module, "LoadModel()"));
    FSDP_ASSIGN_OR_RETURN(catalog,
                          OpenSource(OrReal(options.files), path, folder));
    LoadPlanOptions planning;
    planning.strict = options.strict;
    planning.ignored = options.ignored;
    planning.mapping = options.mapping;
    planning.aliases = &values->model().aliases;
    FSDP_ASSIGN_OR_RETURN(
        plan, Annotate(PlanLoad(catalog, values->model().all, planning), path));
    FSDP_ASSIGN_OR_RETURN(
        reader,
        folder->Open({&catalog}, ReaderOptionsFor(*values, /*world_size=*/1)));
    return Annotate(CompareCopies(plan, *reader), path);
  };
  FSDP_RETURN_IF_ERROR(together.Act(kLoading, make_plan));
  return together.Act(kLoading, [&] {
    return LoadTensors(plan, values->model().all, *reader, options.progress);
  });
}

absl::Status CheckCanExport(const std::string& folder) {
  NewFolder path(OrReal(nullptr), folder);
  std::error_code ignored;
  if (std::filesystem::is_symlink(path.path(), ignored) &&
      !std::filesystem::exists(path.path(), ignored)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.path(),
                     " is a link to nothing: remove it, or name "
                     "another folder"));
  }
  return path.Claim("looks whether it can write a folder");
}

absl::Status ExportModel(const std::string& folder, torch::nn::Module& module,
                         const ExportOptions& options) {
  NewFolder output(OrReal(options.files), folder);
  const NormalMode normal;
  const Together together{RanksOf(module, options.ranks), options.timeout};
  const bool is_first = together.rank() == 0;
  absl::StatusOr<RunValues> values =
      RunValues::ReadModel(&module, "ExportModel()");
  // Later errors may have to be agreed on by all ranks.
  FSDP_RETURN_IF_ERROR(together.Agree(
      values.ok() ? CheckBeforeExport(*values, options) : values.status(),
      kExporting));
  const PartOptions parts{options.dtype, options.stem, options.names};
  FSDP_RETURN_IF_ERROR(CheckSameParts(together, *values, parts));
  SavePlan plan;
  const auto make_plan = [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const std::vector<TensorGroup> groups,
                          PartsToWrite(*values, together.rank(), parts));
    FSDP_ASSIGN_OR_RETURN(plan, PlanSave(groups, options.max_file_bytes));
    if (is_first) plan.Add(options.texts);
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(together.Act(kExporting, make_plan));
  FSDP_RETURN_IF_ERROR(
      together.CheckSame(plan.text, "names and shapes of what is saved"));
  FSDP_RETURN_IF_ERROR(together.Agree(
      is_first ? output.Claim("exports a model") : absl::OkStatus(),
      kExporting));
  // Writes this rank's ranges.
  const auto write = [&]() -> absl::Status {
    std::vector<std::string> paths;
    for (const std::vector<PlannedFile>* const files :
         {&plan.files, &plan.own}) {
      for (const PlannedFile& file : *files) {
        paths.push_back(JoinPath(output.incomplete(), file.name));
      }
    }
    FSDP_ASSIGN_OR_RETURN(
        const auto writer,
        RangeWriter::Create(OrReal(options.files), paths, {}));
    FSDP_RETURN_IF_ERROR(WriteHeaders(plan, together.rank(), *writer));
    FSDP_RETURN_IF_ERROR(WriteLive(plan, *writer));
    return writer->Finish().status();
  };
  FSDP_RETURN_IF_ERROR(together.Act(kExporting, write));
  return together.Agree(is_first ? output.Commit() : absl::OkStatus(),
                        kExporting);
}

}  // namespace fsdp::checkpoint
