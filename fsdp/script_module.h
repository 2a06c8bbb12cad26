// TorchScript modules, compiled from source or loaded from a file, as models
// that can be sharded:
//
//   torch::jit::Module net = torch::jit::load("net.pt");
//   fsdp::Options options;
//   options.wrap_policy = fsdp::WrapScriptModules({"Block"});
//   auto model = fsdp::ValueOrThrow(fsdp::FullyShard(net, ranks, options));
//   at::Tensor logits = model->forward({tokens}).toTensor();
//
// They behave as other models do, with one difference: a script cannot call
// fsdp::Forward, so their units are transparent (Options::transparent).
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

namespace fsdp {

// A script as a module. It has the script's own tensors as parameters and
// buffers under the same names, and each submodule of the script as a
// submodule.
class ScriptModuleImpl : public torch::nn::Module {
 public:
  explicit ScriptModuleImpl(torch::jit::Module script);

  // Runs the script as it is written. TorchScript's optimiser, which is made
  // for inference, is off: fused code would read parameters without an operator
  // that this library could observe.
  c10::IValue forward(std::vector<c10::IValue> inputs);

  // The script that this was made of, with its own methods.
  const torch::jit::Module& script() const { return script_; }
  // The last part of the type's name: "Block" of "__torch__.net.Block".
  std::string type_name() const;

  // NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
  void train(bool on = true) override;

 private:
  // Submodules by the script's object: one that is in two places in the script
  // becomes one module here, too.
  using Known = std::map<const void*, std::shared_ptr<ScriptModuleImpl>>;
  ScriptModuleImpl(torch::jit::Module script,
                   const std::shared_ptr<Known>& known);

  torch::jit::Module script_;
};

TORCH_MODULE(ScriptModule);

// A policy that chooses script modules whose type_name() is one of these.
WrapPolicy WrapScriptModules(std::vector<std::string> type_names);

namespace internal {

// Takes the place of a recompute policy, and throws StatusError
// (InvalidArgument), so that all ranks refuse together.
bool RefuseToRecompute(const WrapCandidate& candidate);

}  // namespace internal

// Shards a script's parameters, which remain the script's own: outside the
// model's forward, `script` and copies of it have no values to run with.
// `ranks` is a mesh or a communicator. InvalidArgument:
// Options::recompute.units is set, but nothing can call a unit of a script
// again.
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
