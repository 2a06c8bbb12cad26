// TorchScript modules, compiled from source or loaded from a file, as models
// that can be sharded:
//
//   torch::jit::Module net = torch::jit::load("net.pt");
//   fsdp::Options options;
//   options.wrap_policy = fsdp::WrapScriptModules({"Block"});
//   auto model = fsdp::ValueOrThrow(fsdp::FullyShard(net, ranks, options));
//   at::Tensor logits = model->forward({tokens}).toTensor();
//
// All that is said of other models holds for them. Nothing in a script can call
// fsdp::Forward, so their units are transparent.
#ifndef FSDP_SCRIPT_MODULE_H_
#define FSDP_SCRIPT_MODULE_H_

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/options/wrap_policy.h"

namespace fsdp {

// A script as a module: the same tensors as parameters and buffers under the
// same names, and each submodule of the script as a submodule.
class ScriptModuleImpl : public torch::nn::Module {
 public:
  explicit ScriptModuleImpl(torch::jit::Module script);

  // Runs the script as it is written. The optimiser of TorchScript, which is
  // made for inference, is off: what it fuses would read parameters without an
  // operator that could be seen.
  c10::IValue forward(std::vector<c10::IValue> inputs);

  const torch::jit::Module& script() const { return script_; }
  // The last part of the type's name: "Block" of "__torch__.net.Block".
  std::string type_name() const;

  // NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
  void train(bool on = true) override;

 private:
  // A submodule in two places is one object, in the script as here.
  using Known = std::map<const void*, std::shared_ptr<ScriptModuleImpl>>;
  ScriptModuleImpl(torch::jit::Module script,
                   const std::shared_ptr<Known>& known);

  torch::jit::Module script_;
};

TORCH_MODULE(ScriptModule);

// Script modules of types with these names.
WrapPolicy WrapScriptModules(std::vector<std::string> type_names);

namespace internal {

// Stands for a recompute policy, which ranks refuse together: throws
// StatusError (InvalidArgument).
bool RefuseToRecompute(const WrapCandidate& candidate);

}  // namespace internal

// Shards a script's parameters, which remain the script's own: `script` and
// copies of it run as the model does inside its forward only. `ranks`: a mesh
// or a communicator. InvalidArgument for Options::recompute.units: nothing can
// call a unit of a script again.
template <typename Ranks>
absl::StatusOr<FullyShardedDataParallel<ScriptModuleImpl>> FullyShard(
    const torch::jit::Module& script, Ranks&& ranks,
    Options options = Options()) {
  options.transparent = true;
  if (options.recompute.units)
    options.recompute.units = internal::RefuseToRecompute;
  return FullyShard(std::make_shared<ScriptModuleImpl>(script),
                    std::forward<Ranks>(ranks), options);
}

}  // namespace fsdp

#endif  // FSDP_SCRIPT_MODULE_H_
