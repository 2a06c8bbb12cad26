#include "checkpoint/load/run_tensors.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/load/model_targets.h"

namespace fsdp::checkpoint {

absl::Status RunTensors::PlanModel(
    Catalog catalog, bool strict,
    const std::function<bool(const std::string& name)>& saves) {
  model_ = std::move(catalog);
  targets_ = TargetsOf(values_);
  LoadPlanOptions options;
  options.strict = strict;
  options.saves = saves;
  FSDP_ASSIGN_OR_RETURN(plan_, PlanLoad(model_, targets_, options));
  return absl::OkStatus();
}

absl::Status RunTensors::PlanAverage(Catalog catalog, WeightAverage& average,
                                     bool strict) {
  of_average_ = &average;
  average_ = std::move(catalog);
  for (size_t i = 0; i < values_.averages().size(); ++i) {
    const at::Tensor& present = values_.averages()[i];
    if (!present.defined()) continue;
    average_leaves_.push_back(static_cast<int>(i));
    average_targets_.push_back(
        StateTarget(values_, average_leaves_.back(), present));
  }
  LoadPlanOptions options;
  options.strict = strict;
  absl::StatusOr<LoadPlan> plan = PlanLoad(average_, average_targets_, options);
  if (!plan.ok()) return Annotate(plan.status(), "the average of the weights");
  average_plan_ = *std::move(plan);
  return absl::OkStatus();
}

absl::Status RunTensors::PlanOptimizer(OptimizerLoader::ReadSlot read_slot,
                                       TrainingRecord& record, bool strict) {
  if (of_run_ == nullptr) return absl::OkStatus();
  optimizer_.emplace(values_, *of_run_);
  return optimizer_->Plan(read_slot, record, strict);
}

absl::Status RunTensors::Open(const SourceFolder& folder,
                              const RangeReaderOptions& options,
                              LoadProgress progress) {
  progress_ = std::move(progress);
  std::vector<const Catalog*> catalogs = {&model_, &average_};
  all_ = BytesOf(plan_) + BytesOf(average_plan_);
  if (optimizer_.has_value()) {
    all_ += optimizer_->bytes();
    for (const Catalog* slot : optimizer_->Catalogs()) catalogs.push_back(slot);
  }
  int64_t files = 0;
  for (const Catalog* catalog : catalogs) {
    first_files_.push_back(files);
    files += static_cast<int64_t>(catalog->files().size());
  }
  FSDP_ASSIGN_OR_RETURN(reader_, folder.OpenAll(catalogs, options));
  return CompareCopies(plan_, *reader_);
}

absl::Status RunTensors::Read(size_t catalog, const LoadPlan& plan,
                              absl::Span<const LoadTarget> targets) {
  LoadProgress progress = nullptr;
  if (progress_ != nullptr) {
    progress = [this](int64_t bytes, int64_t) {
      progress_(done_ + bytes, all_);
    };
  }
  FSDP_RETURN_IF_ERROR(
      LoadTensors(plan, targets, *reader_, progress, first_files_[catalog]));
  done_ += BytesOf(plan);
  return absl::OkStatus();
}

absl::Status RunTensors::FillModel() { return Read(0, plan_, targets_); }

absl::Status RunTensors::FillAverage() {
  if (of_average_ == nullptr) return absl::OkStatus();
  for (size_t i = 0; i < average_leaves_.size(); ++i) {
    const int leaf = average_leaves_[i];
    FSDP_ASSIGN_OR_RETURN(const at::Tensor average,
                          of_average_->ToFill(values_.leaves()[leaf].shard));
    average_targets_[i] = StateTarget(values_, leaf, average);
  }
  return Read(1, average_plan_, average_targets_);
}

absl::Status RunTensors::FillOptimizer() {
  if (!optimizer_.has_value()) return absl::OkStatus();
  return optimizer_->Fill([this](size_t catalog, const LoadPlan& plan,
                                 absl::Span<const LoadTarget> targets) {
    return Read(2 + catalog, plan, targets);
  });
}

}  // namespace fsdp::checkpoint
