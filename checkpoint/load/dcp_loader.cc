#include "checkpoint/load/dcp_loader.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/dcp_optimizer.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/load/dcp_record.h"
#include "checkpoint/load/model_targets.h"
#include "checkpoint/load/run_tensors.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/together.h"
#include "checkpoint/run/training_json.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kWhat[] = "LoadDcp()";

class DcpLoading {
 public:
  DcpLoading(const LoadContext& context, const TrainingRun& run)
      : context_(context),
        run_(run),
        folder_(*context.files, context.root, /*sums=*/nullptr) {}

  absl::Status Load() {
    const NormalMode normal;
    FSDP_RETURN_IF_ERROR(
        context_.agree(Caught(kWhat, [this] { return Plan(); })));
    return context_.agree(Caught(kWhat, [this] { return Fill(); }));
  }

 private:
  absl::Status Plan() {
    FSDP_ASSIGN_OR_RETURN(RunValues values, RunValues::Read(run_, kWhat));
    values_.emplace(std::move(values));
    tensors_.emplace(*values_, run_.optimizer);
    FSDP_ASSIGN_OR_RETURN(DcpMetadata metadata,
                          ReadDcpFolder(*context_.files, context_.root));
    const std::vector<DcpTensor> model = TakeModel(metadata);
    FSDP_ASSIGN_OR_RETURN(
        Catalog catalog,
        FindDcpTensors(*context_.files, context_.root, metadata.files, model));
    FSDP_RETURN_IF_ERROR(
        Annotate(tensors_->PlanModel(std::move(catalog), context_.strict),
                 context_.root));
    if (run_.optimizer != nullptr) {
      FSDP_ASSIGN_OR_RETURN(
          DcpOptimizer stored,
          ReadDcpOptimizer(*context_.files, context_.root, metadata));
      FSDP_RETURN_IF_ERROR(
          Annotate(PlanOptimizer(std::move(stored)), context_.root));
    }
    RangeReaderOptions options;
    options.caching = CachingFor(*values_, context_.world_size);
    return Annotate(tensors_->Open(folder_, options, context_.progress),
                    context_.root);
  }

  absl::Status PlanOptimizer(DcpOptimizer stored) {
    FSDP_ASSIGN_OR_RETURN(
        TrainingRecord record,
        RecordOfDcp(stored, *values_, *run_.optimizer, context_.strict));
    const auto take = [&stored](const std::string& slot) {
      return absl::StatusOr<Catalog>(std::move(stored.slots.at(slot)));
    };
    return tensors_->PlanOptimizer(take, record, context_.strict);
  }

  absl::Status Fill() {
    FSDP_RETURN_IF_ERROR(tensors_->FillModel());
    return tensors_->FillOptimizer();
  }

  const LoadContext& context_;
  const TrainingRun& run_;
  const SourceFolder folder_;
  std::optional<RunValues> values_;
  std::optional<RunTensors> tensors_;
};

}  // namespace

absl::Status LoadDcpRun(const LoadContext& context, const TrainingRun& run) {
  return DcpLoading(context, run).Load();
}

}  // namespace fsdp::checkpoint
