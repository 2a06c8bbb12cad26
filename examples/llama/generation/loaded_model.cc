#include "examples/llama/generation/loaded_model.h"

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adapters/lora.h"
#include "adapters/lora_config.h"
#include "adapters/peft_files.h"
#include "adapters/quantized_base.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/model.h"
#include "fsdp/deferred/deferred_init.h"

namespace llama {
namespace {

using ::fsdp::adapters::LoraConfig;

// `model` has no values yet.
absl::Status Load(const std::string& folder, const LlamaConfig& of_model,
                  const LoadedModelOptions& options, CausalLmImpl& model) {
  std::optional<LoraConfig> config;
  if (!options.adapter.empty()) {
    FSDP_ASSIGN_OR_RETURN(config,
                          fsdp::adapters::ReadLoraConfig(options.adapter));
    FSDP_RETURN_IF_ERROR(fsdp::adapters::AddLora(model, *config));
  }
  FSDP_RETURN_IF_ERROR(LoadBase(folder, of_model, model));
  if (!config.has_value()) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(
      fsdp::adapters::LoadAdapter(options.adapter, model, *config));
  return options.int8_base ? absl::OkStatus()
                           : fsdp::adapters::MergeLora(model);
}

}  // namespace

absl::StatusOr<CausalLm> LoadWholeModel(const std::string& folder,
                                        const LlamaConfig& config,
                                        const LoadedModelOptions& options) {
  CausalLm model = nullptr;
  absl::Status made;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("making the model", [&] {
    const fsdp::DeferredInit deferred;  // no time for random values
    model = CausalLm(config);
    model->to(options.dtype);
    if (options.int8_base) made = fsdp::adapters::QuantizeBase(*model);
    MoveTo(options.device, *model);
  }));
  FSDP_RETURN_IF_ERROR(made);
  FSDP_RETURN_IF_ERROR(Load(folder, config, options, *model));
  model->eval();
  return model;
}

}  // namespace llama
