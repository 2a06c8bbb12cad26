#include "flat_param/tied_parameters.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "flat_param/overlap.h"

namespace fsdp::flat_param {

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

absl::Status TiedParameters::CheckOverlaps() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(parameters_.size());
  for (const NamedParameter& parameter : parameters_) {
    tensors.push_back(parameter.tensors.front());
  }
  const auto overlap = FindOverlap(tensors);
  if (!overlap.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "parameters ", parameters_[overlap->first].name, " and ",
      parameters_[overlap->second].name,
      " are different views of the same memory: flattening would separate "
      "them. Register the memory once and take views in forward"));
}

}  // namespace fsdp::flat_param
