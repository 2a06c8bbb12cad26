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
// dense, else made contiguous.
absl::StatusOr<FlatLayout> LayoutOf(
    const std::vector<NamedParameter>& parameters, int world_size);

// Knows no communication: the caller gathers into memory of its own and hands
// that in. Not thread-safe.
class FlatParameter {
 public:
  // Copies `parameters` (one floating-point dtype, one device) into a new
  // unsharded tensor of layout.padded_numel() elements, padding zero.
  static at::Tensor Flatten(const std::vector<NamedParameter>& parameters,
                            const FlatLayout& layout);

  // Takes this rank's part of `flat` (from Flatten(), maybe broadcast) as the
  // shard and makes the tensors of `parameters` look into the unsharded
  // storage, which is empty: they keep identity, sizes and strides, and any
  // access to them raises `error_if_freed`. `flat` may be dropped afterwards.
  FlatParameter(std::vector<NamedParameter> parameters, FlatLayout layout,
                const at::Tensor& flat, int rank, std::string error_if_freed);

  const FlatLayout& layout() const { return layout_; }
  int rank() const { return rank_; }
  at::ScalarType dtype() const { return shard_.scalar_type(); }
  at::Device device() const { return shard_.device(); }
  int num_parameters() const { return layout_.num_parameters(); }
  const NamedParameter& parameter(int i) const { return parameters_[i]; }

  // 1-D, layout().shard_numel() elements; lives as long as this object.
  const at::Tensor& shard() const { return shard_; }
  // Leaf over this rank's part of parameter i, 1-D, maybe empty: what an
  // optimizer updates. The same object every time.
  const at::Tensor& ShardSlice(int i) const { return slices_[i]; }

  int64_t unsharded_bytes() const { return storage_.bytes(); }
  bool filled() const { return storage_.filled(); }
  // `memory`: uint8, at least unsharded_bytes(), holding the gathered flat
  // parameter; kept until Empty().
  void Fill(at::Tensor memory);
  void Empty();
  // `memory` seen as the flat parameter: 1-D, padded_numel(), of dtype().
  at::Tensor AsFlat(const at::Tensor& memory) const;

  // Whether `tensor` looks into this flat parameter's unsharded storage.
  bool Owns(const at::Tensor& tensor) const;
  // FailedPrecondition when a parameter no longer looks into the storage,
  // because the module was moved or converted or its data was replaced.
  absl::Status CheckBinding() const;

 private:
  void Bind();

  const std::vector<NamedParameter> parameters_;
  const FlatLayout layout_;
  const int rank_;
  GuardedStorage storage_;
  at::Tensor memory_;  // behind storage_ while that is filled
  at::Tensor shard_;
  std::vector<at::Tensor> slices_;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLAT_PARAMETER_H_
