// The parameters of one unit and dtype as one flat parameter: a shard that
// rests on this rank, and unsharded storage that is filled while the unit
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

// One distinct parameter and every tensor object that stands for it: one, or
// several where tied tensors share memory without being the same object.
struct NamedParameter {
  std::string name;
  std::vector<at::Tensor> tensors;  // never empty
};

// How parameters lie in a flat parameter: sizes and strides as they are where
// dense, else made contiguous. Aligned for `narrowest`, the smaller of the
// dtypes the flat parameter will have.
absl::StatusOr<FlatLayout> LayoutOf(
    const std::vector<NamedParameter>& parameters, at::ScalarType narrowest,
    int world_size);

// `value`, of the parameter's sizes and any strides or sparse, as 1-D in the
// parameter's storage order, unknown to autograd. Copies only where the strides
// differ.
at::Tensor StorageOrderOf(const at::Tensor& value, const ParameterSpec& spec);

// Which dtype the unsharded parameters have.
enum class Precision {
  kCompute,  // the one the unit computes in
  kFull,     // that of the shard
};

// Whether `range`, a 1-D part of a parameter, is as Flatten() has left one
// without values. Reads it all where it is not floating-point.
bool HasNoValues(const at::Tensor& range);

// Knows no communication: the caller gathers into memory of its own and hands
// that in. Not thread-safe.
class FlatParameter {
 public:
  // Copies `parameters` (one floating-point dtype, one device) into a new
  // unsharded tensor of layout.padded_numel() elements, padding zero.
  // `value_of`: the values of a tensor, itself for example, dropped after use;
  // undefined: none, of which HasNoValues() tells.
  static at::Tensor Flatten(
      const std::vector<NamedParameter>& parameters, const FlatLayout& layout,
      absl::FunctionRef<at::Tensor(const at::Tensor&)> value_of);
  static at::Tensor Flatten(const std::vector<NamedParameter>& parameters,
                            const FlatLayout& layout) {
    return Flatten(parameters, layout, [](const at::Tensor& t) { return t; });
  }

  // Takes this rank's part of `flat` (from Flatten(), maybe broadcast) as the
  // shard and makes the tensors of `parameters` look into the unsharded
  // storage, which is empty: they keep identity, sizes and strides, get
  // `compute_dtype`, and any access to them raises `error_if_freed`. `flat` may
  // be dropped afterwards. `rest`, where defined, is memory
  // for this rank's shard, 1-D, layout.shard_numel(), of the dtype of `flat`.
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
  // Leaf over this rank's part of parameter i, 1-D, maybe empty: what an
  // optimizer updates. The same object every time.
  const at::Tensor& ShardSlice(int i) const { return slices_[i]; }

  // The dtype of unsharded parameters, kCompute at first. Only while empty.
  // Tensors keep their identity.
  void SetPrecision(Precision precision);
  Precision precision() const { return precision_; }
  at::ScalarType unsharded_dtype() const {
    return precision_ == Precision::kFull ? dtype() : compute_dtype_;
  }

  // Of the present precision, as are all below.
  int64_t unsharded_bytes() const { return storage().bytes(); }
  bool filled() const { return storage().filled(); }
  // `memory`: uint8, at least unsharded_bytes(), holding the gathered flat
  // parameter; kept until Empty().
  void Fill(at::Tensor memory);
  void Empty();
  // `memory` as the flat parameter: 1-D, padded_numel(), unsharded_dtype().
  at::Tensor AsFlat(const at::Tensor& memory) const;

  // AsFlat() of what Fill() has given; only while filled.
  at::Tensor Unsharded() const { return AsFlat(memory_); }

  // Makes the tensors look into `flat` instead, which may be on another device:
  // 1-D, padded_numel(), of dtype(). Only while empty; until BindToStorage().
  void BindTo(const at::Tensor& flat);
  void BindToStorage() { Bind(); }

  // Parameter i as it lies in `flat`, a tensor of padded_numel() elements.
  at::Tensor ViewOf(const at::Tensor& flat, int i) const;

  // What TagOf() tells of tensors that look into the unsharded storage, of
  // either precision.
  void SetTag(const void* tag);

  // Whether `tensor` looks into this flat parameter's unsharded storage.
  bool Owns(const at::Tensor& tensor) const;
  // The parameter in which a tensor that it Owns() begins.
  int IndexOf(const at::Tensor& tensor) const;
  // FailedPrecondition when a parameter no longer looks into the storage,
  // because the module was moved or converted or its data was replaced, or a
  // slice of the shard no longer into the shard.
  absl::Status CheckBinding() const;

 private:
  void Bind();
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
  at::Tensor memory_;  // behind storage() while that is filled
  at::Tensor shard_;
  std::vector<at::Tensor> slices_;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLAT_PARAMETER_H_
