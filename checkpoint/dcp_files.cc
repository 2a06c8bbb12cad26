#include "checkpoint/dcp_files.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/normal_mode.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/tensor_parts.h"
#include "checkpoint/run/together.h"
#include "checkpoint/save/dcp_export.h"
#include "checkpoint/save/dcp_groups.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kWhat[] = "ExportDcp()";

absl::StatusOr<DcpExportOptions> OptionsFor(const RunValues& values,
                                            const ExportDcpOptions& options) {
  DcpExportOptions result;
  result.names = options.torchtitan ? DcpNames::kTorchtitan : DcpNames::kPlain;
  result.timeout = options.timeout;
  if (values.optimizer() == nullptr) return result;
  for (const auto& [parameter, slots] : values.optimizer()->slots) {
    result.numbers[parameter] = slots.numbers;
  }
  FSDP_ASSIGN_OR_RETURN(
      result.values, DcpGroupValues(result.names, values.optimizer()->groups));
  return result;
}

absl::Status Export(const std::string& folder, const TrainingRun& run,
                    const ExportDcpOptions& options) {
  const NormalMode normal;
  absl::StatusOr<RunValues> values = RunValues::Read(run, kWhat);
  const Together together(
      run.model == nullptr ? options.ranks : RanksOf(*run.model, options.ranks),
      "exporting a DCP checkpoint", options.timeout);
  FSDP_RETURN_IF_ERROR(together.Agree(values.status()));
  PartOptions parts;
  parts.model_dtype = options.model_dtype;
  FSDP_RETURN_IF_ERROR(CheckSameParts(together, *values, parts));
  DcpExportOptions wanted;
  std::vector<TensorGroup> groups;
  const auto plan = [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(wanted, OptionsFor(*values, options));
    FSDP_ASSIGN_OR_RETURN(groups,
                          PartsToWrite(*values, together.rank(), parts));
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(together.Agree(plan()));
  return WriteDcp(options.files == nullptr ? RealFileSystem() : *options.files,
                  folder, groups, together.ranks(), wanted);
}

}  // namespace

absl::Status ExportDcp(const std::string& folder, const TrainingRun& run,
                       const ExportDcpOptions& options) {
  return TorchToStatus(kWhat,
                       [&] { ThrowIfError(Export(folder, run, options)); });
}

}  // namespace fsdp::checkpoint
