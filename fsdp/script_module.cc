#include "fsdp/script_module.h"

#include <torch/csrc/jit/runtime/graph_executor.h>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "base/status_macros.h"

namespace fsdp {

ScriptModuleImpl::ScriptModuleImpl(torch::jit::Module script)
    : ScriptModuleImpl(std::move(script), std::make_shared<Known>()) {}

ScriptModuleImpl::ScriptModuleImpl(torch::jit::Module script,
                                   const std::shared_ptr<Known>& known)
    : torch::nn::Module("fsdp::ScriptModule"), script_(std::move(script)) {
  // This sets the mode of this module alone, which has no children yet.
  torch::nn::Module::train(script_.is_training());
  for (const auto& item : script_.named_parameters(/*recurse=*/false)) {
    register_parameter(item.name, item.value, item.value.requires_grad());
  }
  for (const auto& item : script_.named_buffers(/*recurse=*/false)) {
    register_buffer(item.name, item.value);
  }
  for (const auto& item : script_.named_children()) {
    std::shared_ptr<ScriptModuleImpl>& child =
        (*known)[item.value._ivalue().get()];
    if (child == nullptr) child.reset(new ScriptModuleImpl(item.value, known));
    register_module(item.name, child);
  }
}

c10::IValue ScriptModuleImpl::forward(std::vector<c10::IValue> inputs) {
  const torch::jit::GraphOptimizerEnabledGuard as_written(false);
  return script_.forward(std::move(inputs));
}

std::string ScriptModuleImpl::type_name() const {
  return script_.type()->name()->name();
}

// NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
void ScriptModuleImpl::train(bool on) {
  torch::nn::Module::train(on);
  script_.train(on);
}

WrapPolicy WrapScriptModules(std::vector<std::string> type_names) {
  return [type_names = std::move(type_names)](const WrapCandidate& candidate) {
    const auto* module =
        dynamic_cast<const ScriptModuleImpl*>(&candidate.module);
    return module != nullptr &&
           absl::c_linear_search(type_names, module->type_name());
  };
}

bool internal::RefuseToRecompute(const WrapCandidate&) {
  throw StatusError(absl::InvalidArgumentError(
      "Options::recompute.units of a script: nothing can call a unit of a "
      "script again. Leave it empty, or put the call of the whole model into "
      "fsdp::Checkpoint()"));
}

}  // namespace fsdp
