#include "fsdp/setup/module_tree.h"

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/guarded_storage.h"
#include "flat_param/module_walk.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/deferred/deferred_tensor.h"

namespace fsdp {
namespace {

using ::torch::nn::Module;

absl::Status CheckParameter(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", name, " is undefined"));
  }
  if (tensor.layout() != c10::kStrided || tensor.is_quantized() ||
      tensor.is_meta() || !tensor.has_storage()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", name, " has no dense memory of its own (",
                     c10::toString(tensor.scalar_type()),
                     tensor.is_meta() ? ", on the meta device" : "",
                     "): only dense tensors can be sharded"));
  }
  // LibTorch itself refuses byte tensors that require a gradient.
  if (!c10::isFloatingType(tensor.scalar_type()) &&
      tensor.scalar_type() != c10::kByte) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", name, " has dtype ", c10::toString(tensor.scalar_type()),
        ": only floating-point parameters can be sharded, and bytes (Byte), "
        "which are frozen. Register it as a buffer, or its bytes, "
        "view(torch::kByte)"));
  }
  if (HasOurEdge(tensor) || flat_param::IsGuarded(tensor.storage())) {
    return absl::FailedPreconditionError(
        absl::StrCat("parameter ", name,
                     " already belongs to a unit of a sharded model: shard "
                     "the outermost module, once, and choose the units inside "
                     "it by Options::wrap_policy. If sharding it has failed "
                     "half-way, make a new one"));
  }
  return absl::OkStatus();
}

class Reader {
 public:
  explicit Reader(const Options& options) : options_(options) {}

  // Returns the elements below `module` that no unit below it owns.
  absl::StatusOr<int64_t> Read(const std::shared_ptr<Module>& module,
                               const std::string& path, int parent) {
    const int index = static_cast<int>(tree_.nodes.size());
    tree_.nodes.push_back({path, parent, parent == -1, Identity(*module)});
    tree_.modules.push_back(module);
    tree_.unowned_numel.push_back(0);
    FSDP_ASSIGN_OR_RETURN(int64_t unowned,
                          ReadOwnParameters(*module, path, index));
    for (const auto& child : module->named_children()) {
      const std::string child_path = flat_param::JoinName(path, child.key());
      if (options_.ignore.module &&
          options_.ignore.module(child_path, *child.value())) {
        continue;
      }
      FSDP_ASSIGN_OR_RETURN(const int64_t below,
                            Read(child.value(), child_path, index));
      unowned += below;
    }
    tree_.unowned_numel[index] = unowned;
    if (parent == -1 || !IsWanted(*module, path, unowned)) return unowned;
    tree_.nodes[index].is_unit = true;
    return 0;
  }

  // Fails if parameters overlap without being the same view.
  absl::StatusOr<ModuleTree> Take() {
    FSDP_RETURN_IF_ERROR(ties_.CheckOverlaps("sharding"));
    for (flat_param::NamedParameter& parameter : ties_.Take()) {
      tree_.parameters.push_back(std::move(parameter.tensors));
    }
    return std::move(tree_);
  }

 private:
  // Asks about a module once, even if it has several places, which must agree.
  bool IsWanted(const Module& module, const std::string& path,
                int64_t unowned) {
    if (!options_.wrap_policy || !CanBeUnit(module)) return false;
    const auto [it, is_new] = wanted_.try_emplace(&module, false);
    if (is_new)
      it->second = options_.wrap_policy(WrapCandidate{path, module, unowned});
    return it->second;
  }

  int Identity(const Module& module) {
    return identities_.try_emplace(&module, identities_.size()).first->second;
  }

  absl::StatusOr<int64_t> ReadOwnParameters(const Module& module,
                                            const std::string& path,
                                            int index) {
    int64_t numel = 0;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const std::string name = flat_param::JoinName(path, item.key());
      if (options_.ignore.parameter &&
          options_.ignore.parameter(name, item.value())) {
        continue;
      }
      FSDP_RETURN_IF_ERROR(CheckParameter(name, item.value()));
      tree_.uses.push_back({index, name, ties_.Add(name, item.value())});
      numel += item.value().numel();
    }
    return numel;
  }

  const Options& options_;
  ModuleTree tree_;
  std::map<const Module*, int> identities_;
  std::map<const Module*, bool> wanted_;
  flat_param::TiedParameters ties_;
};

}  // namespace

bool CanBeUnit(const Module& module) {
  return module.as<torch::nn::ModuleListImpl>() == nullptr &&
         module.as<torch::nn::ModuleDictImpl>() == nullptr;
}

absl::StatusOr<ModuleTree> ReadModuleTree(const std::shared_ptr<Module>& root,
                                          const Options& options) {
  Reader reader(options);
  FSDP_RETURN_IF_ERROR(reader.Read(root, "", -1).status());
  return reader.Take();
}

namespace {

std::vector<at::Tensor> OwnTensors(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters(/*recurse=*/false);
  for (at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
    tensors.push_back(std::move(buffer));
  }
  return tensors;
}

// Returns a seed that is the same on every machine.
uint64_t SeedFor(absl::string_view path, uint64_t seed) {
  const uint64_t hash = Fnv1a(path, kFnv1a ^ seed);
  // Generators use the lower half of a seed.
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
