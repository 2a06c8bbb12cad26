#include "checkpoint/model_files.h"

#include <filesystem>
#include <limits>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/format/catalog.h"
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

// --- Loading ----------------------------------------------------------------

class ModelLoad {
 public:
  ModelLoad(const std::string& path, torch::nn::Module& module,
            const LoadModelOptions& options)
      : path_(path),
        module_(module),
        options_(options),
        files_(OrReal(options.files)) {}

  absl::Status Run() {
    const NormalMode normal;
    const Together together(RanksOf(module_), kLoading, options_.timeout);
    FSDP_RETURN_IF_ERROR(
        together.Agree(TorchToStatus(kLoading, [this] { return Plan(); })));
    return together.Agree(TorchToStatus(kLoading, [this] {
      return LoadTensors(plan_, values_->model().all, *reader_,
                         options_.progress);
    }));
  }

 private:
  absl::Status Plan() {
    if (RanksOf(module_) == nullptr) {
      FSDP_RETURN_IF_ERROR(Materialize(module_));
    }
    FSDP_ASSIGN_OR_RETURN(RunValues values,
                          RunValues::ReadModel(&module_, "LoadModel()"));
    values_.emplace(std::move(values));
    FSDP_RETURN_IF_ERROR(ReadCatalog());
    LoadPlanOptions options;
    options.strict = options_.strict;
    options.mapping = options_.mapping;
    options.aliases = &values_->model().aliases;
    absl::StatusOr<LoadPlan> plan =
        PlanLoad(catalog_, values_->model().all, options);
    if (!plan.ok()) return Annotate(plan.status(), path_);
    plan_ = *std::move(plan);
    FSDP_ASSIGN_OR_RETURN(
        reader_, folder_->Open(catalog_, ReaderOptionsFor(*values_,
                                                          /*world_size=*/1)));
    return Annotate(CompareCopies(plan_, *reader_), path_);
  }

  absl::Status ReadCatalog() {
    FSDP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(files_, path_));
    const std::string root = is_folder ? path_ : FolderOf(path_);
    // A file of one of our checkpoints is read with its checksums.
    FSDP_ASSIGN_OR_RETURN(const bool is_checkpoint,
                          Exists(files_, JoinPath(root, kTrainingName)));
    FSDP_ASSIGN_OR_RETURN(const bool has_manifest,
                          Exists(files_, JoinPath(root, kManifestName)));
    if (is_checkpoint && has_manifest) {
      FSDP_ASSIGN_OR_RETURN(manifest_, ReadManifest(files_, root));
    }
    folder_.emplace(files_, root,
                    manifest_.has_value() ? &manifest_->files : nullptr);
    if (is_folder) {
      FSDP_ASSIGN_OR_RETURN(catalog_, folder_->ReadModel());
    } else {
      FSDP_ASSIGN_OR_RETURN(
          catalog_, folder_->ReadFileOrIndex(std::string(LastPart(path_))));
    }
    return absl::OkStatus();
  }

  const std::string& path_;
  torch::nn::Module& module_;
  const LoadModelOptions& options_;
  FileSystem& files_;
  std::optional<RunValues> values_;
  std::optional<Manifest> manifest_;
  std::optional<SourceFolder> folder_;
  Catalog catalog_;
  LoadPlan plan_;
  std::unique_ptr<RangeReader> reader_;
};

// --- Saving -----------------------------------------------------------------

class ModelExport {
 public:
  ModelExport(torch::nn::Module& module, const ExportOptions& options,
              NewPath& output)
      : module_(module),
        options_(options),
        output_(output),
        together_(RanksOf(module, options.ranks), kExporting, options.timeout) {
  }

  absl::Status Run() {
    const NormalMode normal;
    absl::StatusOr<RunValues> values =
        RunValues::ReadModel(&module_, "ExportModel()");
    // Later errors may have to be agreed on by all ranks.
    FSDP_RETURN_IF_ERROR(
        together_.Agree(values.ok() ? Check(*values) : values.status()));
    PartOptions parts;
    parts.model_dtype = options_.dtype;
    parts.model_stem = options_.stem;
    parts.names = options_.names;
    FSDP_RETURN_IF_ERROR(CheckSameParts(together_, *values, parts));
    const auto plan = [&]() -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const std::vector<TensorGroup> groups,
                            PartsToWrite(*values, together_.rank(), parts));
      FSDP_ASSIGN_OR_RETURN(
          plan_, PlanSave(groups, options_.texts, options_.max_file_bytes));
      return absl::OkStatus();
    };
    FSDP_RETURN_IF_ERROR(together_.Agree(TorchToStatus(kExporting, plan)));
    FSDP_RETURN_IF_ERROR(
        together_.CheckSame(plan_.text, "names and shapes of what is saved"));
    FSDP_RETURN_IF_ERROR(together_.Agree(
        IsFirst() ? output_.Claim("exports a model") : absl::OkStatus()));
    FSDP_RETURN_IF_ERROR(
        together_.Agree(TorchToStatus(kExporting, [this] { return Write(); })));
    return together_.Agree(IsFirst() ? output_.Commit() : absl::OkStatus());
  }

 private:
  bool IsFirst() const { return together_.rank() == 0; }

  absl::Status Check(const RunValues& values) const {
    FSDP_RETURN_IF_ERROR(values.CheckLoaded());
    FSDP_RETURN_IF_ERROR(CheckPlainFileName(options_.stem));
    for (const auto& [name, text] : options_.texts) {
      FSDP_RETURN_IF_ERROR(CheckTextName("ExportOptions::texts", name));
    }
    return absl::OkStatus();
  }

  // Writes this rank's ranges.
  absl::Status Write() {
    std::vector<std::string> paths;
    paths.reserve(plan_.files.size());
    for (const SaveFile& file : plan_.files) {
      paths.push_back(output_.kind() == NewPath::Kind::kFolder
                          ? JoinPath(output_.incomplete(), file.name)
                          : output_.incomplete());
    }
    FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeWriter> writer,
                          RangeWriter::Create(OrReal(options_.files), paths,
                                              RangeWriterOptions()));
    if (IsFirst()) FSDP_RETURN_IF_ERROR(WriteHeads(plan_, *writer));
    FSDP_RETURN_IF_ERROR(WriteLive(plan_, *writer));
    return writer->Finish().status();
  }

  torch::nn::Module& module_;
  const ExportOptions& options_;
  NewPath& output_;
  const Together together_;
  SavePlan plan_;
};

}  // namespace

absl::Status LoadModel(const std::string& path, torch::nn::Module& module,
                       const LoadModelOptions& options) {
  return ModelLoad(path, module, options).Run();
}

absl::Status CheckCanExport(const std::string& folder) {
  NewPath path(OrReal(nullptr), folder, NewPath::Kind::kFolder);
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
  NewPath output(OrReal(options.files), folder, NewPath::Kind::kFolder);
  return ModelExport(module, options, output).Run();
}

absl::Status ExportFile(const std::string& path, torch::nn::Module& module,
                        const ExportOptions& options) {
  ExportOptions one = options;
  one.max_file_bytes = std::numeric_limits<int64_t>::max();
  one.texts.clear();
  NewPath output(OrReal(options.files), path, NewPath::Kind::kReplacedFile);
  return ModelExport(module, one, output).Run();
}

}  // namespace fsdp::checkpoint
