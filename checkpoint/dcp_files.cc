#include "checkpoint/dcp_files.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/normal_mode.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/load/dcp_loader.h"
#include "checkpoint/load/run_loader.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/tensor_parts.h"
#include "checkpoint/run/together.h"
#include "checkpoint/save/dcp_export.h"
#include "checkpoint/save/dcp_groups.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kWhat[] = "ExportDcp()";

Together TogetherOf(const TrainingRun& run, comm::Communicator* otherwise,
                    absl::string_view what, absl::Duration timeout) {
  return Together(
      run.model == nullptr ? otherwise : RanksOf(*run.model, otherwise), what,
      timeout);
}

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
  const Together together = TogetherOf(
      run, options.ranks, "exporting a DCP checkpoint", options.timeout);
  DcpExportOptions wanted;
  const auto take = [&]() -> absl::Status {
    FSDP_RETURN_IF_ERROR(values.status());
    FSDP_RETURN_IF_ERROR(values->CheckLoaded());
    FSDP_ASSIGN_OR_RETURN(wanted, OptionsFor(*values, options));
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(together.Agree(take()));
  PartOptions parts;
  parts.model_dtype = options.model_dtype;
  FSDP_RETURN_IF_ERROR(CheckSameParts(together, *values, parts));
  std::vector<TensorGroup> groups;
  const auto plan = [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(groups,
                          PartsToWrite(*values, together.rank(), parts));
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(together.Agree(Caught(kWhat, plan)));
  return WriteDcp(OrReal(options.files), folder, groups, together.ranks(),
                  wanted);
}

absl::Status Load(const std::string& folder, const TrainingRun& run,
                  const LoadDcpOptions& options) {
  const Together together = TogetherOf(
      run, /*otherwise=*/nullptr, "loading a DCP checkpoint", options.timeout);
  LoadContext context;
  context.files = &OrReal(options.files);
  context.root = folder;
  if (together.ranks() != nullptr) {
    context.rank = together.rank();
    context.world_size = together.ranks()->world_size();
  }
  context.agree = [&together](const absl::Status& mine) {
    return together.Agree(mine);
  };
  context.strict = options.strict;
  context.progress = options.progress;
  return LoadDcpRun(context, run);
}

}  // namespace

absl::Status ExportDcp(const std::string& folder, const TrainingRun& run,
                       const ExportDcpOptions& options) {
  return TorchToStatus(kWhat,
                       [&] { ThrowIfError(Export(folder, run, options)); });
}

absl::Status LoadDcp(const std::string& folder, const TrainingRun& run,
                     const LoadDcpOptions& options) {
  return TorchToStatus("LoadDcp()",
                       [&] { ThrowIfError(Load(folder, run, options)); });
}

}  // namespace fsdp::checkpoint
