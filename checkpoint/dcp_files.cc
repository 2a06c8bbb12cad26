#include "checkpoint/dcp_files.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "base/normal_mode.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/tensor_parts.h"
#include "checkpoint/run/training_json.h"
#include "checkpoint/save/dcp_export.h"
#include "checkpoint/save/dcp_groups.h"
#include "comm/agreement.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kWhat[] = "ExportDcp()";

absl::StatusOr<DcpExportOptions> OptionsFor(const TrainingRun& run,
                                            const RunValues& values,
                                            const ExportDcpOptions& options) {
  DcpExportOptions result;
  result.names = options.torchtitan ? DcpNames::kTorchtitan : DcpNames::kPlain;
  result.timeout = options.timeout;
  if (values.optimizer() == nullptr) return result;
  result.numbers =
      RecordOf(run, values.optimizer(), /*step=*/0, /*world_size=*/1).numbers;
  FSDP_ASSIGN_OR_RETURN(
      result.values, DcpGroupValues(result.names, values.optimizer()->groups));
  return result;
}

absl::Status Export(const std::string& folder, const TrainingRun& run,
                    const ExportDcpOptions& options) {
  const NormalMode normal;
  absl::StatusOr<RunValues> values = RunValues::Read(run, kWhat);
  comm::Communicator* ranks =
      run.model == nullptr ? nullptr : RanksOf(*run.model);
  if (ranks == nullptr) ranks = options.ranks;
  const auto agree = [&](const absl::Status& mine) {
    if (ranks == nullptr) return mine;
    return comm::Agree(*ranks, mine, "exporting a DCP checkpoint",
                       absl::Now() + options.timeout);
  };
  FSDP_RETURN_IF_ERROR(agree(values.status()));
  DcpExportOptions wanted;
  std::vector<TensorGroup> groups;
  const int rank = ranks == nullptr ? 0 : ranks->rank();
  const auto plan = [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(wanted, OptionsFor(run, *values, options));
    PartOptions parts;
    parts.model_dtype = options.model_dtype;
    FSDP_ASSIGN_OR_RETURN(groups, PartsToWrite(*values, rank, parts));
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(agree(plan()));
  return WriteDcp(options.files == nullptr ? RealFileSystem() : *options.files,
                  folder, groups, ranks, wanted);
}

}  // namespace

absl::Status ExportDcp(const std::string& folder, const TrainingRun& run,
                       const ExportDcpOptions& options) {
  return TorchToStatus(kWhat,
                       [&] { ThrowIfError(Export(folder, run, options)); });
}

}  // namespace fsdp::checkpoint
