#include "testing/gpt/training/checkpoints.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/model_files.h"
#include "comm/agreement.h"

namespace gpt {
namespace {

using ::fsdp::checkpoint::Checkpointer;
using ::fsdp::checkpoint::CheckpointerOptions;
using ::fsdp::comm::Communicator;

constexpr char kConfigName[] = "config.json";

// Refuses several ranks without sharding: each trains a model of its own.
absl::Status CheckIsOneModel(const TrainOptions& options, int world_size,
                             absl::string_view flag) {
  if (options.sharding != Sharding::kNone || world_size == 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, " with --sharding=none and ", world_size,
      " ranks, each of which trains a model of its own: --sharding=replicated "
      "trains one, whole on every rank"));
}

absl::Status CheckIsEmpty(const Checkpointer& checkpoints,
                          const TrainOptions& options) {
  if (options.resume) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, checkpoints.Steps());
  if (steps.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "--save=", options.save, " has checkpoints, the newest of step ",
      steps.back(), ": --resume goes on from it; or name another folder"));
}

}  // namespace

std::string ConfigJson(const GptConfig& config) {
  const fsdp::Json json(fsdp::Json::Object{
      {"architectures", fsdp::Json::Array{"ByteLevelGpt"}},
      {"model_type", "fsdp_example_gpt"},
      {"vocab_size", config.vocab},
      {"hidden_size", config.dim},
      {"intermediate_size", 4 * config.dim},
      {"num_hidden_layers", config.layers},
      {"num_attention_heads", config.heads},
      {"max_position_embeddings", config.seq},
      {"hidden_act", "gelu_pytorch_tanh"},
      {"layer_norm_eps", 1e-5},
      {"tie_word_embeddings", false},
      {"torch_dtype", "float32"},
  });
  return json.ToString() + "\n";
}

absl::StatusOr<std::unique_ptr<Checkpointer>> OpenCheckpoints(
    const TrainOptions& options,
    const std::shared_ptr<Communicator>& communicator) {
  if (options.save.empty()) return nullptr;
  FSDP_RETURN_IF_ERROR(
      CheckIsOneModel(options, communicator->world_size(), "save"));
  CheckpointerOptions checkpointer;
  if (options.keep_last > 0) checkpointer.keep_last = options.keep_last;
  if (options.object_store) {
    checkpointer.layout = fsdp::checkpoint::SaveLayout::kPerRank;
    checkpointer.commit_by = fsdp::checkpoint::CommitBy::kManifest;
  }
  // A replica may have checkpoints of steps that the others go through again.
  checkpointer.overwrite = options.replicas > 0;
  checkpointer.texts[kConfigName] = ConfigJson(options.model);
  FSDP_ASSIGN_OR_RETURN(
      std::unique_ptr<Checkpointer> checkpoints,
      Checkpointer::Open(options.save, communicator, checkpointer));
  FSDP_RETURN_IF_ERROR(
      fsdp::comm::Agree(*communicator, CheckIsEmpty(*checkpoints, options),
                        "looking for checkpoints",
                        absl::Now() + communicator->default_timeout()));
  return checkpoints;
}

absl::Status CheckExport(const TrainOptions& options, int world_size) {
  if (options.export_dir.empty()) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(CheckIsOneModel(options, world_size, "export"));
  return fsdp::Annotate(fsdp::checkpoint::CheckCanExport(options.export_dir),
                        "--export");
}

absl::Status ExportTrained(const TrainOptions& options, TrainableModel& model,
                           Communicator& communicator) {
  if (options.export_dir.empty()) return absl::OkStatus();
  fsdp::checkpoint::ExportOptions exported;
  exported.texts[kConfigName] = ConfigJson(options.model);
  exported.ranks = &communicator;
  return fsdp::checkpoint::ExportModel(options.export_dir, model.module(),
                                       exported);
}

}  // namespace gpt
