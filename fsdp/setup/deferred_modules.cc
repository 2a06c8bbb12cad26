#include "fsdp/setup/deferred_modules.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/deferred/seed_guard.h"

namespace fsdp {
namespace {

std::vector<at::Tensor> OwnTensors(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters(/*recurse=*/false);
  for (at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
    tensors.push_back(std::move(buffer));
  }
  return tensors;
}

// FNV-1a, the same on every machine.
uint64_t SeedFor(absl::string_view path, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (const char c : path) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  // Generators look at the lower half.
  return hash ^ (hash >> 32);
}

}  // namespace

ModuleInitializer::ModuleInitializer(const ModuleTree& tree, InitModule init,
                                     uint64_t seed)
    : tree_(tree), init_(std::move(init)), seed_(seed) {
  waits_.resize(tree.nodes.size());
  users_.resize(tree.parameters.size());
  if (!init_) return;
  for (const ParameterUse& use : tree.uses) {
    users_[use.parameter].push_back(use.module);
  }
  for (size_t node = 0; node < tree.nodes.size(); ++node) {
    for (const at::Tensor& tensor : OwnTensors(*tree.modules[node])) {
      if (IsDeferred(tensor)) waits_[node] = true;
    }
  }
}

absl::Status ModuleInitializer::InitUsersOf(const Unit& unit) {
  for (const OwnedParameter& owned : unit.parameters) {
    for (const int node : users_[owned.parameter]) {
      FSDP_RETURN_IF_ERROR(Init(node));
    }
  }
  return absl::OkStatus();
}

absl::Status ModuleInitializer::InitTheRest() {
  for (size_t node = 0; node < waits_.size(); ++node) {
    FSDP_RETURN_IF_ERROR(Init(static_cast<int>(node)));
  }
  return absl::OkStatus();
}

absl::Status ModuleInitializer::Init(int node) {
  if (!waits_[node]) return absl::OkStatus();
  waits_[node] = false;
  torch::nn::Module& module = *tree_.modules[node];
  const std::string& path = tree_.nodes[node].path;
  return TorchToStatus(absl::StrCat("initialising module ", path), [&] {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& tensor : OwnTensors(module)) Materialize(tensor);
    const SeedGuard seeded(SeedFor(path, seed_));
    return init_(path, module);
  });
}

}  // namespace fsdp
