// The parameters of one unit and dtype as one flat parameter: a shard that
// rests on this rank, and storage for the whole that is filled while the unit
// computes (ZeRO stage 3; FlatParameter in PyTorch FSDP, Zhao et al., 2023).
#ifndef FLAT_PARAM_FLAT_PARAMETER_H_
#define FLAT_PARAM_FLAT_PARAMETER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "flat_param/guarded_storage.h"
#include "flat_param/layout.h"

namespace fsdp::flat_param {

// One distinct parameter, and every tensor object that stands for it: several
// if tied tensors share memory without being the same object.
struct NamedParameter {
  std::string name;
  std::vector<at::Tensor> tensors;  // never empty
};

// Lays `parameters` out in a flat parameter. Dense ones keep sizes and strides;
// others are made contiguous. `narrowest` is the smaller of the dtypes that the
// flat parameter will have, for the alignment.
absl::StatusOr<FlatLayout> LayoutOf(
    const std::vector<NamedParameter>& parameters, at::ScalarType narrowest,
    int world_size, int64_t alignment_bytes = FlatLayout::kAlignmentBytes);

// Returns `value`, of the parameter's sizes and any strides or sparse, as 1-D
// in the parameter's storage order, unknown to autograd. It is copied if the
// strides differ, or if it is sparse or a lazy negation or zero.
at::Tensor StorageOrderOf(const at::Tensor& value, const ParameterSpec& spec);

// The dtype of the whole parameters.
enum class Precision {
  kCompute,  // the dtype that the unit computes in
  kFull,     // the dtype of the shard
};

// Returns whether Flatten() has left `range`, a 1-D part of a parameter,
// without values. Reads all of it unless it is floating-point.
bool HasNoValues(const at::Tensor& range);

// Does not communicate: callers gather into their own memory and hand that in.
// Not thread-safe.
class FlatParameter {
 public:
  // Copies `parameters` (one floating-point dtype, one device) into a new
  // tensor of layout.padded_numel() elements, with zero padding. `value_of`
  // returns the values of a tensor, perhaps itself, which are dropped after
  // use; undefined: there are none (HasNoValues()).
  static at::Tensor Flatten(
      const std::vector<NamedParameter>& parameters, const FlatLayout& layout,
      absl::FunctionRef<at::Tensor(const at::Tensor&)> value_of);
  static at::Tensor Flatten(const std::vector<NamedParameter>& parameters,
                            const FlatLayout& layout) {
    return Flatten(parameters, layout, [](const at::Tensor& t) { return t; });
  }

  // Takes this rank's part of `flat` (from Flatten(), maybe broadcast) as the
  // shard, and makes the tensors of `parameters` look into the empty storage of
  // the whole. They keep identity, sizes and strides and get `compute_dtype`;
  // any access raises `error_if_freed`. `flat` may then be dropped. `rest`, if
  // defined, is memory for the shard: 1-D, layout.shard_numel(), of the dtype
  // of `flat`.
  FlatParameter(std::vector<NamedParameter> parameters, FlatLayout layout,
                const at::Tensor& flat, int rank, at::ScalarType compute_dtype,
                const std::string& error_if_freed,
                const at::Tensor& rest = at::Tensor());

  const FlatLayout& layout() const { return layout_; }
  int rank() const { return rank_; }
  at::ScalarType dtype() const { return shard_.scalar_type(); }
  at::ScalarType compute_dtype() const { return compute_dtype_; }
  at::Device device() const { return shard_.device(); }
  int num_parameters() const { return layout_.num_parameters(); }
  const NamedParameter& parameter(int i) const { return parameters_[i]; }

  // 1-D, layout().shard_numel() elements; lives as long as this object.
  const at::Tensor& shard() const { return shard_; }
  // A leaf over this rank's part of parameter i, for an optimizer to update:
  // 1-D, maybe empty, the same object every time.
  const at::Tensor& ShardSlice(int i) const { return slices_[i]; }

  // Sets the dtype of the whole parameters, kCompute at first, while empty.
  // Tensors keep their identity.
  void SetPrecision(Precision precision);
  Precision precision() const { return precision_; }
  at::ScalarType unsharded_dtype() const {
    return precision_ == Precision::kFull ? dtype() : compute_dtype_;
  }

  // This and all below depend on the present precision.
  int64_t unsharded_bytes() const { return storage().bytes(); }
  bool filled() const { return storage().filled(); }
  // Fills the storage with `memory`: the gathered flat parameter, uint8, at
  // least unsharded_bytes(). It is kept until Empty().
  void Fill(at::Tensor memory);
  void Empty();
  // Returns `memory` as the flat parameter: 1-D, padded_numel(),
  // unsharded_dtype().
  at::Tensor AsFlat(const at::Tensor& memory) const;

  // Makes the tensors look into `flat` until BindToStorage(), while empty.
  // `flat` has dim 1, padded_numel() elements and dtype(), and may be on
  // another device.
  void BindTo(const at::Tensor& flat);
  void BindToStorage();

  // Returns parameter i in `flat`, a tensor of padded_numel() elements.
  at::Tensor ViewOf(const at::Tensor& flat, int i) const;

  // Sets what TagOf() returns for tensors in the storage of the whole, of
  // either precision.
  void SetTag(const void* tag);

  // Returns whether `tensor` looks into the storage of the whole.
  bool Owns(const at::Tensor& tensor) const;
  // Returns the parameter in which `tensor` begins; Owns(tensor) must hold.
  int IndexOf(const at::Tensor& tensor) const;
  // FailedPrecondition: a parameter no longer looks into the storage, because
  // the module was moved or converted or its data was replaced; or a slice of
  // the shard no longer into the shard.
  absl::Status CheckBinding() const;

 private:
  bool IsSliceOfShard(int i) const;
  GuardedStorage& storage() const {
    return precision_ == Precision::kFull && full_ != nullptr ? *full_
                                                              : *compute_;
  }

  const std::vector<NamedParameter> parameters_;
  const FlatLayout layout_;
  const int rank_;
  const at::ScalarType compute_dtype_;
  Precision precision_ = Precision::kCompute;
  std::unique_ptr<GuardedStorage> compute_;
  std::unique_ptr<GuardedStorage> full_;  // null: the dtypes are the same
  at::Tensor memory_;  // fills storage() while that is filled
  at::Tensor shard_;
  std::vector<at::Tensor> slices_;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLAT_PARAMETER_H_
