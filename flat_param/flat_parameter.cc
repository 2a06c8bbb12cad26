#include "flat_param/flat_parameter.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/DimVector.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/normal_mode.h"
#include "base/tensor_over.h"

namespace fsdp::flat_param {
namespace {

// Every byte of a range without values: a NaN that nothing computes.
constexpr uint8_t kNoValue = 0xff;

bool IsDense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense();
}

}  // namespace

absl::StatusOr<FlatLayout> LayoutOf(
    const std::vector<NamedParameter>& parameters, at::ScalarType narrowest,
    int world_size, int64_t alignment_bytes) {
  std::vector<ParameterSpec> specs;
  specs.reserve(parameters.size());
  for (const NamedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensors.front();
    const c10::DimVector rows = c10::contiguous_strides(tensor.sizes());
    const c10::IntArrayRef strides = IsDense(tensor) ? tensor.strides() : rows;
    specs.push_back({parameter.name, tensor.sizes().vec(), strides.vec()});
  }
  return FlatLayout::Create(std::move(specs),
                            static_cast<int64_t>(c10::elementSize(narrowest)),
                            world_size, alignment_bytes);
}

at::Tensor StorageOrderOf(const at::Tensor& value, const ParameterSpec& spec) {
  at::Tensor dense = value.is_sparse() ? value.to_dense() : value;
  // A lazy negation or zero has other values in memory, or none.
  if (dense.strides() != c10::IntArrayRef(spec.strides) || dense.is_neg() ||
      dense._is_zerotensor()) {
    at::Tensor copy =
        at::empty_strided(spec.sizes, spec.strides, dense.options());
    copy.copy_(dense);
    dense = std::move(copy);
  }
  return TensorOver(dense.storage(), dense.storage_offset(), {dense.numel()},
                    {1}, dense.scalar_type());
}

bool HasNoValues(const at::Tensor& range) {
  if (range.numel() == 0) return false;
  const int64_t looked_at = range.is_floating_point() ? 1 : range.numel();
  return range.detach()
      .narrow(0, 0, looked_at)
      .view(at::kByte)
      .eq(kNoValue)
      .all()
      .item<bool>();
}

at::Tensor FlatParameter::Flatten(
    const std::vector<NamedParameter>& parameters, const FlatLayout& layout,
    absl::FunctionRef<at::Tensor(const at::Tensor&)> value_of) {
  c10::NoGradGuard no_grad;
  const at::Tensor& first = parameters.front().tensors.front();
  at::Tensor flat =
      at::zeros({layout.padded_numel()}, first.options().requires_grad(false));
  for (int i = 0; i < layout.num_parameters(); ++i) {
    const Slice slice = layout.InFlat(i);
    const at::Tensor part = flat.narrow(0, slice.begin, slice.numel());
    const at::Tensor value = value_of(parameters[i].tensors.front());
    if (value.defined()) {
      const at::Tensor dense = IsDense(value) ? value : value.contiguous();
      part.copy_(dense.as_strided({dense.numel()}, {1}));
    } else {
      part.view(at::kByte).fill_(kNoValue);
    }
  }
  return flat;
}

FlatParameter::FlatParameter(std::vector<NamedParameter> parameters,
                             FlatLayout layout, const at::Tensor& flat,
                             int rank, at::ScalarType compute_dtype,
                             const std::string& error_if_freed,
                             const at::Tensor& rest)
    : parameters_(std::move(parameters)),
      layout_(std::move(layout)),
      rank_(rank),
      compute_dtype_(compute_dtype) {
  const auto storage_of = [&](at::ScalarType dtype) {
    return std::make_unique<GuardedStorage>(
        layout_.padded_numel() * static_cast<int64_t>(c10::elementSize(dtype)),
        flat.device(), error_if_freed);
  };
  compute_ = storage_of(compute_dtype_);
  if (flat.scalar_type() != compute_dtype_) {
    full_ = storage_of(flat.scalar_type());
  }
  FSDP_CHECK(flat.dim() == 1 && flat.numel() == layout_.padded_numel());
  c10::NoGradGuard no_grad;
  const Slice range = layout_.ShardRange(rank);
  const at::Tensor own = flat.narrow(0, range.begin, range.numel());
  if (rest.defined()) {
    FSDP_CHECK(rest.sizes() == own.sizes() &&
               rest.scalar_type() == flat.scalar_type());
    shard_ = rest;
    shard_.copy_(own);
  } else {
    shard_ = own.clone();
  }
  for (int i = 0; i < layout_.num_parameters(); ++i) {
    const Slice slice = layout_.InShard(i, rank);
    at::Tensor leaf = shard_.narrow(0, slice.begin, slice.numel()).detach();
    const std::vector<at::Tensor>& tied = parameters_[i].tensors;
    leaf.set_requires_grad(
        std::any_of(tied.begin(), tied.end(),
                    [](const at::Tensor& t) { return t.requires_grad(); }));
    slices_.push_back(std::move(leaf));
  }
  BindToStorage();
}

void FlatParameter::BindToStorage() {
  const NormalMode normal;
  for (int i = 0; i < layout_.num_parameters(); ++i) {
    const ParameterSpec& spec = layout_.parameter(i);
    const at::Tensor view =
        TensorOver(storage().storage(), layout_.InFlat(i).begin, spec.sizes,
                   spec.strides, unsharded_dtype());
    for (const at::Tensor& tensor : parameters_[i].tensors) {
      tensor.set_data(view);
    }
  }
}

void FlatParameter::SetPrecision(Precision precision) {
  if (precision == precision_) return;
  FSDP_CHECK(!filled());
  precision_ = precision;
  if (full_ != nullptr) BindToStorage();
}

void FlatParameter::Fill(at::Tensor memory) {
  FSDP_CHECK(static_cast<int64_t>(memory.nbytes()) >= unsharded_bytes());
  memory_ = std::move(memory);
  storage().Fill(memory_.mutable_data_ptr());
}

void FlatParameter::Empty() {
  storage().Empty();
  memory_.reset();
}

at::Tensor FlatParameter::AsFlat(const at::Tensor& memory) const {
  FSDP_CHECK(static_cast<int64_t>(memory.nbytes()) >= unsharded_bytes());
  return RangeOf(memory, unsharded_dtype(), 0, layout_.padded_numel());
}

void FlatParameter::BindTo(const at::Tensor& flat) {
  FSDP_CHECK(!filled() && flat.scalar_type() == dtype());
  const NormalMode normal;
  for (int i = 0; i < num_parameters(); ++i) {
    const at::Tensor view = ViewOf(flat, i);
    for (const at::Tensor& tensor : parameters_[i].tensors) {
      tensor.set_data(view);
    }
  }
}

at::Tensor FlatParameter::ViewOf(const at::Tensor& flat, int i) const {
  FSDP_CHECK(flat.numel() == layout_.padded_numel());
  const ParameterSpec& spec = layout_.parameter(i);
  return flat.as_strided(spec.sizes, spec.strides,
                         flat.storage_offset() + layout_.InFlat(i).begin);
}

void FlatParameter::SetTag(const void* tag) {
  compute_->SetTag(tag);
  if (full_ != nullptr) full_->SetTag(tag);
}

bool FlatParameter::Owns(const at::Tensor& tensor) const {
  return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() ==
                                     storage().storage().unsafeGetStorageImpl();
}

int FlatParameter::IndexOf(const at::Tensor& tensor) const {
  const int64_t element =
      tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()) /
      static_cast<int64_t>(c10::elementSize(unsharded_dtype()));
  int i = 0;
  while (i + 1 < num_parameters() && layout_.InFlat(i + 1).begin <= element) {
    ++i;
  }
  return i;
}

bool FlatParameter::IsSliceOfShard(int i) const {
  const at::Tensor& slice = slices_[i];
  const Slice range = layout_.InShard(i, rank_);
  return slice.has_storage() && slice.dim() == 1 &&
         slice.numel() == range.numel() &&
         slice.scalar_type() == shard_.scalar_type() &&
         slice.storage_offset() == shard_.storage_offset() + range.begin &&
         slice.storage().unsafeGetStorageImpl() ==
             shard_.storage().unsafeGetStorageImpl();
}

absl::Status FlatParameter::CheckBinding() const {
  for (int i = 0; i < num_parameters(); ++i) {
    const NamedParameter& parameter = parameters_[i];
    const c10::IntArrayRef sizes = layout_.parameter(i).sizes;
    for (const at::Tensor& tensor : parameter.tensors) {
      // A resize_() of empty storage fails, but only after changing the sizes.
      if (Owns(tensor) && tensor.sizes() == sizes) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter ", parameter.name,
          " no longer looks into its unit's memory: the module was moved, "
          "converted or resized, or its data was replaced, after it was "
          "sharded. Do that before sharding, and write values through the "
          "shards"));
    }
    if (IsSliceOfShard(i)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the shard of parameter ", parameter.name,
        " no longer looks into the memory that the model computes from: its "
        "data was replaced, by set_data() for example, and an optimizer would "
        "step what is no part of the model. Write into it instead, by copy_() "
        "under a NoGradGuard"));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::flat_param
