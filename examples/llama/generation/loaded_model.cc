#include "examples/llama/generation/loaded_model.h"

#include <c10/core/ScalarType.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adapters/lora.h"
#include "adapters/lora_config.h"
#include "adapters/peft_files.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/model_files.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/model.h"
#include "fsdp/deferred/deferred_init.h"

namespace llama {
namespace {

absl::Status AddAdapter(const std::string& base, const std::string& adapter,
                        CausalLmImpl& model) {
  FSDP_ASSIGN_OR_RETURN(const fsdp::adapters::LoraConfig config,
                        fsdp::adapters::ReadLoraConfig(adapter));
  FSDP_RETURN_IF_ERROR(fsdp::adapters::AddLora(model, config));
  fsdp::checkpoint::LoadModelOptions of_base;
  of_base.mapping = fsdp::adapters::OfBaseModel();
  FSDP_RETURN_IF_ERROR(fsdp::checkpoint::LoadModel(base, model, of_base));
  FSDP_RETURN_IF_ERROR(fsdp::adapters::LoadAdapter(adapter, model, config));
  return fsdp::adapters::MergeLora(model);
}

}  // namespace

absl::StatusOr<LlamaConfig> ReadConfig(const std::string& folder) {
  FSDP_ASSIGN_OR_RETURN(const std::string text, ReadConfigText(folder));
  return ParseLlamaConfig(text);
}

absl::StatusOr<CausalLm> LoadWholeModel(const std::string& folder,
                                        const std::string& adapter,
                                        const LlamaConfig& config,
                                        c10::ScalarType dtype) {
  CausalLm model = nullptr;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("making the model", [&] {
    const fsdp::DeferredInit deferred;  // no time for random values
    model = CausalLm(config);
    model->to(dtype);
  }));
  FSDP_RETURN_IF_ERROR(adapter.empty()
                           ? fsdp::checkpoint::LoadModel(folder, *model)
                           : AddAdapter(folder, adapter, *model));
  model->eval();
  return model;
}

}  // namespace llama
