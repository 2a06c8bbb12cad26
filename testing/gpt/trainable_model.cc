#include "testing/gpt/trainable_model.h"

#include <ATen/ops/randint.h>

#include <cstdint>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/model_files.h"
#include "comm/agreement.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/options/options.h"
#include "planner/choose/choose_options.h"

namespace gpt {
namespace {

using ::fsdp::Json;
using ::fsdp::checkpoint::Checkpointer;
using ::fsdp::comm::Communicator;

constexpr char kConfigName[] = "config.json";

// Returns what fsdp::ChooseOptions() makes of `base`.
absl::StatusOr<fsdp::Options> Choose(
    const TrainOptions& options, const Gpt& model, fsdp::Options base,
    const std::shared_ptr<Communicator>& ranks) {
  fsdp::AutoOptions wanted;
  wanted.memory_bytes = options.auto_memory;
  wanted.rows = options.batch;
  wanted.base = std::move(base);
  wanted.base.offload.directory = options.offload.directory;
  const c10::Device device = model->parameters().front().device();
  wanted.loss = [&](int64_t rows) {
    const at::Tensor tokens =
        at::randint(options.model.vocab, {rows, options.model.seq},
                    at::TensorOptions(at::kLong).device(device));
    return NextTokenLoss(model.ptr()->forward(tokens).to(at::kFloat), tokens);
  };
  FSDP_ASSIGN_OR_RETURN(const fsdp::AutoChoice choice,
                        fsdp::ChooseOptions(model.ptr(), ranks, wanted));
  if (ranks->rank() == 0) std::cout << choice.ToString() << std::flush;
  return choice.options;
}

// Returns the text of config.json, which lies beside the weights: the model's
// sizes under the names that transformers has for them.
std::string ConfigJson(const GptConfig& config) {
  const Json json(Json::Object{
      {"architectures", Json::Array{"ByteLevelGpt"}},
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

// Refuses several ranks without sharding: each trains a model of its own.
absl::Status CheckIsOneModel(const TrainOptions& options, int world_size,
                             absl::string_view flag) {
  if (options.sharding.has_value() || world_size == 1) return absl::OkStatus();
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

at::Tensor TrainableModel::Forward(const at::Tensor& tokens) {
  return sharded_.is_empty() ? plain_->forward(tokens)
                             : sharded_->forward(tokens);
}

absl::Status TrainableModel::Backward(const at::Tensor& loss) {
  if (!sharded_.is_empty()) return sharded_->Backward(loss);
  return fsdp::TorchToStatus("backward", [&loss] { loss.backward(); });
}

std::vector<at::Tensor> TrainableModel::OptimizerParameters() {
  return sharded_.is_empty() ? plain_->parameters() : sharded_->Parameters();
}

torch::nn::Module& TrainableModel::module() {
  if (sharded_.is_empty()) return *plain_;
  return *sharded_;
}

const fsdp::OffloadSpace* TrainableModel::offload() const {
  return sharded_.is_empty() ? nullptr : sharded_->sharded_model().offload();
}

absl::StatusOr<TrainableModel> MakeTrainable(
    const TrainOptions& options, Gpt model,
    const std::shared_ptr<Communicator>& ranks) {
  if (!options.sharding.has_value()) {
    return TrainableModel(std::move(model));
  }
  fsdp::Options sharding;
  sharding.wrap_policy = fsdp::WrapModules<BlockImpl>();
  if (options.automatic) {
    FSDP_ASSIGN_OR_RETURN(sharding, Choose(options, model, sharding, ranks));
  } else {
    sharding.unit.strategy = *options.sharding;
    sharding.offload = options.offload;
  }
  FSDP_ASSIGN_OR_RETURN(TrainableModel::Sharded sharded,
                        fsdp::FullyShard(model, ranks, sharding));
  return TrainableModel(std::move(sharded));
}

absl::StatusOr<std::unique_ptr<Checkpointer>> OpenCheckpoints(
    const TrainOptions& options, const std::shared_ptr<Communicator>& ranks) {
  if (options.save.empty()) return nullptr;
  FSDP_RETURN_IF_ERROR(CheckIsOneModel(options, ranks->world_size(), "save"));
  fsdp::checkpoint::CheckpointerOptions checkpointer;
  if (options.keep_last > 0) checkpointer.keep_last = options.keep_last;
  if (options.object_store) {
    checkpointer.layout = fsdp::checkpoint::SaveLayout::kPerRank;
    checkpointer.commit_by = fsdp::checkpoint::CommitBy::kManifest;
  }
  // A replica may have checkpoints of steps that the others go through again.
  checkpointer.overwrite = options.replicas > 0;
  checkpointer.texts[kConfigName] = ConfigJson(options.model);
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Checkpointer> checkpoints,
                        Checkpointer::Open(options.save, ranks, checkpointer));
  FSDP_RETURN_IF_ERROR(fsdp::comm::Agree(
      *ranks, CheckIsEmpty(*checkpoints, options), "looking for checkpoints",
      absl::Now() + ranks->default_timeout()));
  return checkpoints;
}

absl::Status CheckExport(const TrainOptions& options, int world_size) {
  if (options.export_dir.empty()) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(CheckIsOneModel(options, world_size, "export"));
  return fsdp::Annotate(fsdp::checkpoint::CheckCanExport(options.export_dir),
                        "--export");
}

absl::Status ExportTrained(const TrainOptions& options, TrainableModel& model,
                           Communicator& ranks) {
  if (options.export_dir.empty()) return absl::OkStatus();
  fsdp::checkpoint::ExportOptions exported;
  exported.texts[kConfigName] = ConfigJson(options.model);
  exported.ranks = &ranks;
  return fsdp::checkpoint::ExportModel(options.export_dir, model.module(),
                                       exported);
}

}  // namespace gpt
