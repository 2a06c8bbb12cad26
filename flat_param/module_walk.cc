#include "flat_param/module_walk.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace fsdp::flat_param {

namespace {

using ::torch::nn::Module;

// A derived class may name the protected member; the pointer to it is one to a
// member of Module and fits every module.
struct DictionaryAccess : Module {
  template <typename M>
  static auto& Of(M& module) {
    return module.*(&DictionaryAccess::parameters_);
  }
};

void Visit(const std::string& path, const std::shared_ptr<Module>& module,
           std::vector<ModulePlace>& places) {
  places.push_back({path, module});
  if (const auto* wrapper = dynamic_cast<const WrapperModule*>(module.get())) {
    Visit(path, wrapper->wrapped_module(), places);
    return;
  }
  for (const auto& child : module->named_children()) {
    Visit(JoinName(path, child.key()), child.value(), places);
  }
}

}  // namespace

std::vector<ModulePlace> PlacesOf(const std::shared_ptr<Module>& root) {
  std::vector<ModulePlace> places;
  Visit("", root, places);
  return places;
}

std::string JoinName(absl::string_view path, absl::string_view key) {
  return path.empty() ? std::string(key) : absl::StrCat(path, ".", key);
}

torch::OrderedDict<std::string, at::Tensor>& RegisteredParameters(
    Module& module) {
  return DictionaryAccess::Of(module);
}

const torch::OrderedDict<std::string, at::Tensor>& RegisteredParameters(
    const Module& module) {
  return DictionaryAccess::Of(module);
}

int TiedParameters::Add(const std::string& name, const at::Tensor& tensor) {
  const auto object = objects_.find(tensor.unsafeGetTensorImpl());
  if (object != objects_.end()) return object->second;
  const int next = static_cast<int>(parameters_.size());
  int number = next;
  if (tensor.numel() > 0) {
    const View view{tensor.storage().unsafeGetStorageImpl(),
                    tensor.storage_offset(), tensor.sizes().vec(),
                    tensor.strides().vec()};
    number = views_.try_emplace(view, next).first->second;
  }
  if (number == next) parameters_.push_back({name, {}});
  parameters_[number].tensors.push_back(tensor);
  objects_[tensor.unsafeGetTensorImpl()] = number;
  return number;
}

// Parameters overlap if one begins between the other's first and last element.
absl::Status TiedParameters::CheckOverlaps(absl::string_view what) const {
  struct Extent {
    const void* storage;
    int64_t begin;
    int64_t end;
    const std::string* name;
  };
  std::vector<Extent> extents;
  for (const NamedParameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensors.front();
    if (tensor.numel() == 0) continue;
    int64_t last = tensor.storage_offset();
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
    extents.push_back({tensor.storage().unsafeGetStorageImpl(),
                       tensor.storage_offset(), last + 1, &parameter.name});
  }
  std::sort(
      extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
        return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin);
      });
  for (size_t i = 1; i < extents.size(); ++i) {
    const Extent& a = extents[i - 1];
    const Extent& b = extents[i];
    if (a.storage != b.storage || a.end <= b.begin) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameters ", *a.name, " and ", *b.name,
        " are different views of the same memory: ", what,
        " would separate them. Register the memory once and take views in "
        "forward"));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::flat_param
