#include "checkpoint/model_files.h"

#include <torch/nn/module.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/load_target.h"
#include "checkpoint/load/model_targets.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/run.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/tensor_parts.h"
#include "checkpoint/save/plan_writer.h"
#include "checkpoint/save/save_plan.h"
#include "comm/agreement.h"
#include "fsdp/deferred/deferred_init.h"

namespace fsdp::checkpoint {
namespace {

// In a folder that is being written.
constexpr char kLockName[] = ".lock";

FileSystem& Or(FileSystem* files) {
  return files == nullptr ? RealFileSystem() : *files;
}

absl::StatusOr<RunValues> ReadValues(torch::nn::Module& module,
                                     absl::string_view what) {
  TrainingRun run;
  run.model = &module;
  return RunValues::Read(run, what);
}

// What ranks agree on, where there are several.
class Together {
 public:
  Together(comm::Communicator* ranks, absl::string_view what,
           absl::Duration timeout)
      : ranks_(ranks), what_(what), timeout_(timeout) {}

  int rank() const { return ranks_ == nullptr ? 0 : ranks_->rank(); }
  absl::Status Agree(const absl::Status& mine) const {
    if (ranks_ == nullptr) return mine;
    return comm::Agree(*ranks_, mine, what_, absl::Now() + timeout_);
  }
  absl::Status CheckSame(const std::string& text) const {
    if (ranks_ == nullptr) return absl::OkStatus();
    return comm::CheckSame(*ranks_, text, "names and shapes of what is saved",
                           absl::Now() + timeout_);
  }

 private:
  comm::Communicator* const ranks_;
  const std::string what_;
  const absl::Duration timeout_;
};

// --- Loading ----------------------------------------------------------------

class ModelLoad {
 public:
  ModelLoad(const std::string& path, torch::nn::Module& module,
            const LoadModelOptions& options)
      : path_(path),
        module_(module),
        options_(options),
        files_(Or(options.files)) {}

  absl::Status Run() {
    const NormalMode normal;
    const Together together(RanksOf(module_), "loading a model",
                            options_.timeout);
    FSDP_RETURN_IF_ERROR(together.Agree(Plan()));
    return together.Agree(Fill());
  }

 private:
  absl::Status Plan() {
    if (RanksOf(module_) == nullptr) {
      FSDP_RETURN_IF_ERROR(Materialize(module_));
    }
    FSDP_ASSIGN_OR_RETURN(RunValues values, ReadValues(module_, "LoadModel()"));
    values_.emplace(std::move(values));
    FSDP_RETURN_IF_ERROR(ReadCatalog());
    targets_ = TargetsOf(*values_);
    LoadPlanOptions options;
    options.strict = options_.strict;
    options.mapping = options_.mapping;
    absl::StatusOr<LoadPlan> plan = PlanLoad(catalog_, targets_, options);
    if (!plan.ok()) {
      return absl::Status(plan.status().code(),
                          absl::StrCat(path_, ": ", plan.status().message()));
    }
    plan_ = *std::move(plan);
    return absl::OkStatus();
  }

  absl::Status ReadCatalog() {
    FSDP_ASSIGN_OR_RETURN(const FileInfo info, files_.Stat(path_));
    // A link is what it leads to.
    const bool is_folder =
        info.kind == FileInfo::Kind::kFolder ||
        (info.kind == FileInfo::Kind::kOther && files_.List(path_).ok());
    folder_.emplace(files_, is_folder ? path_ : FolderOf(path_),
                    /*sums=*/nullptr);
    if (is_folder) {
      FSDP_ASSIGN_OR_RETURN(catalog_, folder_->ReadModel());
    } else {
      FSDP_ASSIGN_OR_RETURN(catalog_, folder_->ReadFileOrIndex(
                                          path_.substr(path_.rfind('/') + 1)));
    }
    return absl::OkStatus();
  }

  absl::Status Fill() {
    RangeReaderOptions options;
    options.caching = CachingFor(*values_, /*world_size=*/1);
    FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeReader> reader,
                          folder_->Open(catalog_, options));
    return LoadTensors(plan_, targets_, *reader, options_.progress);
  }

  const std::string& path_;
  torch::nn::Module& module_;
  const LoadModelOptions& options_;
  FileSystem& files_;
  std::optional<RunValues> values_;
  std::optional<SourceFolder> folder_;
  Catalog catalog_;
  std::vector<LoadTarget> targets_;
  LoadPlan plan_;
};

// --- Saving -----------------------------------------------------------------

// Where an export goes. Of its methods only Path() is called on all ranks.
class Destination {
 public:
  virtual ~Destination() = default;
  // Of the plan's file of that name, as long as it is being written.
  virtual std::string Path(const std::string& name) const = 0;
  // Before anything is written.
  virtual absl::Status Begin(const SavePlan& plan) = 0;
  // Everything is on the disk.
  virtual absl::Status Commit() = 0;
  virtual void Discard() = 0;
};

class NewFolder final : public Destination {
 public:
  NewFolder(FileSystem& files, std::string path)
      : files_(files),
        path_(std::move(path)),
        incomplete_(absl::StrCat(path_, ".incomplete")) {}

  std::string Path(const std::string& name) const override {
    return JoinPath(incomplete_, name);
  }

  absl::Status Begin(const SavePlan&) override {
    FSDP_RETURN_IF_ERROR(CheckIsNew());
    FSDP_RETURN_IF_ERROR(files_.MakeFolder(incomplete_).status());
    FSDP_ASSIGN_OR_RETURN(
        lock_,
        files_.Lock(Path(kLockName), absl::StrCat("process ", getpid(),
                                                  ", which exports a model")));
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                          files_.List(incomplete_));
    for (const std::string& name : names) {
      if (name == kLockName) continue;
      FSDP_RETURN_IF_ERROR(RemoveTree(files_, Path(name)));
    }
    return absl::OkStatus();
  }

  absl::Status Commit() override {
    FSDP_RETURN_IF_ERROR(CheckIsNew());
    FSDP_RETURN_IF_ERROR(files_.RemoveFile(Path(kLockName)));
    FSDP_RETURN_IF_ERROR(files_.SyncFolder(incomplete_));
    FSDP_RETURN_IF_ERROR(files_.Rename(incomplete_, path_));
    return files_.SyncFolder(FolderOf(path_));
  }

  void Discard() override {
    // Without the lock it is another call's.
    if (lock_ != nullptr) RemoveTree(files_, incomplete_).IgnoreError();
  }

 private:
  absl::Status CheckIsNew() {
    FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files_, path_));
    if (!exists) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat(
        path_, " exists: name a new folder for the model, or move that one"));
  }

  FileSystem& files_;
  const std::string path_;
  const std::string incomplete_;
  std::unique_ptr<FileLock> lock_;
};

class OneFile final : public Destination {
 public:
  OneFile(FileSystem& files, std::string path)
      : files_(files),
        path_(std::move(path)),
        incomplete_(absl::StrCat(path_, ".incomplete")) {}

  std::string Path(const std::string&) const override { return incomplete_; }
  absl::Status Begin(const SavePlan&) override {
    FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files_, path_));
    if (exists) {
      FSDP_ASSIGN_OR_RETURN(const FileInfo info, files_.Stat(path_));
      if (info.kind == FileInfo::Kind::kFolder) {
        return absl::InvalidArgumentError(
            absl::StrCat(path_, " is a folder: name a file"));
      }
    }
    // What is there of it is not cut off when it is opened.
    FSDP_ASSIGN_OR_RETURN(const bool left, Exists(files_, incomplete_));
    return left ? files_.RemoveFile(incomplete_) : absl::OkStatus();
  }
  absl::Status Commit() override {
    FSDP_RETURN_IF_ERROR(files_.Rename(incomplete_, path_));
    return files_.SyncFolder(FolderOf(path_));
  }
  void Discard() override { files_.RemoveFile(incomplete_).IgnoreError(); }

 private:
  FileSystem& files_;
  const std::string path_;
  const std::string incomplete_;
};

class ModelExport {
 public:
  ModelExport(torch::nn::Module& module, const ExportOptions& options,
              Destination& destination)
      : module_(module),
        options_(options),
        destination_(destination),
        together_(RanksOf(module) == nullptr ? options.ranks : RanksOf(module),
                  "exporting a model", options.timeout) {}

  absl::Status Run() {
    const NormalMode normal;
    absl::StatusOr<RunValues> values = ReadValues(module_, "ExportModel()");
    // What follows may need all ranks.
    FSDP_RETURN_IF_ERROR(together_.Agree(values.status()));
    FSDP_RETURN_IF_ERROR(together_.Agree(Plan(*values)));
    FSDP_RETURN_IF_ERROR(together_.CheckSame(plan_.text));
    FSDP_RETURN_IF_ERROR(together_.Agree(
        IsFirst() ? OrDiscard(destination_.Begin(plan_)) : absl::OkStatus()));
    const absl::Status written = together_.Agree(Write());
    if (!IsFirst()) {
      return written.ok() ? together_.Agree(absl::OkStatus()) : written;
    }
    if (!written.ok()) return OrDiscard(written);
    return together_.Agree(OrDiscard(destination_.Commit()));
  }

 private:
  bool IsFirst() const { return together_.rank() == 0; }

  absl::Status OrDiscard(const absl::Status& status) {
    if (!status.ok()) destination_.Discard();
    return status;
  }

  absl::Status Plan(const RunValues& values) {
    for (const auto& [name, text] : options_.texts) {
      FSDP_RETURN_IF_ERROR(CheckTextName("ExportOptions::texts", name));
    }
    PartOptions parts;
    parts.model_dtype = options_.dtype;
    FSDP_ASSIGN_OR_RETURN(const std::vector<TensorGroup> groups,
                          PartsToWrite(values, together_.rank(), parts));
    FSDP_ASSIGN_OR_RETURN(
        plan_, PlanSave(groups, options_.texts, options_.max_file_bytes));
    return absl::OkStatus();
  }

  // This rank's ranges, to the disk.
  absl::Status Write() {
    std::vector<std::string> paths;
    for (const SaveFile& file : plan_.files) {
      paths.push_back(destination_.Path(file.name));
    }
    FSDP_ASSIGN_OR_RETURN(
        const std::unique_ptr<RangeWriter> writer,
        RangeWriter::Create(Or(options_.files), paths, RangeWriterOptions()));
    if (IsFirst()) FSDP_RETURN_IF_ERROR(WriteHeads(plan_, *writer));
    FSDP_RETURN_IF_ERROR(WriteLive(plan_, *writer));
    return writer->Finish().status();
  }

  torch::nn::Module& module_;
  const ExportOptions& options_;
  Destination& destination_;
  const Together together_;
  SavePlan plan_;
};

}  // namespace

absl::Status LoadModel(const std::string& path, torch::nn::Module& module,
                       const LoadModelOptions& options) {
  return ModelLoad(path, module, options).Run();
}

absl::Status ExportModel(const std::string& folder, torch::nn::Module& module,
                         const ExportOptions& options) {
  std::string path = folder;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  NewFolder destination(Or(options.files), path);
  return ModelExport(module, options, destination).Run();
}

absl::Status ExportFile(const std::string& path, torch::nn::Module& module,
                        const ExportOptions& options) {
  ExportOptions one = options;
  one.max_file_bytes = std::numeric_limits<int64_t>::max();
  one.texts.clear();
  OneFile destination(Or(options.files), path);
  return ModelExport(module, one, destination).Run();
}

}  // namespace fsdp::checkpoint
