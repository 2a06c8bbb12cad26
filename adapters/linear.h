// A linear layer that can learn by a low-rank adapter while its own weight is
// frozen.
#ifndef ADAPTERS_LINEAR_H_
#define ADAPTERS_LINEAR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "adapters/int8_rows.h"

namespace fsdp::adapters {

struct LowRankOptions {
  int64_t rank = 8;    // at least 1
  double scale = 1;    // of what the adapter adds
  double dropout = 0;  // of its inputs, in training mode; in [0, 1)
  // Of its parameters, whatever the weight has.
  c10::ScalarType dtype = c10::kFloat;
};

// One factor of an adapter: its parameter "weight" [out, in]. No
// torch::nn::Linear, so that no policy makes it a unit of its own.
class FactorImpl : public torch::nn::Module {
 public:
  FactorImpl(int64_t in, int64_t out, const at::TensorOptions& options);

  at::Tensor weight;
};
TORCH_MODULE(Factor);

// A torch::nn::Linear with the same parameters, for models to have in its
// place. With an adapter (LoRA: Hu et al. 2021, arXiv:2106.09685),
//   y = x W^T + b + scale * dropout(x) A^T B^T,
// where A is the parameter "lora_A.weight" [rank, in], as random as a Linear's
// weight, and B "lora_B.weight" [out, rank], zero at first: it computes what it
// did until they have learned. The names are those of Python's PEFT.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  // x [..., in] -> [..., out], of the dtype that the layer gives without an
  // adapter, whose factors see x in their own dtype.
  at::Tensor forward(const at::Tensor& x);

  // Once, on numbers or int8. The factors are on the weight's device.
  void AddLowRank(const LowRankOptions& options);
  bool has_low_rank() const { return !a_.is_empty(); }
  double low_rank_scale() const { return scale_; }
  // Adds what the adapter has learned to the weight, which is one of numbers
  // afterwards, and makes B zero.
  void Merge();

  // Once: from now on the weight is frozen, and at most `block` numbers of a
  // row share a scale: the parameter "weight" becomes Pack() of what it was,
  // uint8 [out, bytes of a row], and the layer computes as Int8Linear() does.
  void Quantize(int64_t block);
  // Unset: the weight is one of numbers.
  const std::optional<Int8Rows>& int8_rows() const { return int8_rows_; }
  // The weight that it computes with, in `dtype`: [out, in].
  at::Tensor WeightIn(c10::ScalarType dtype) const;

 private:
  std::optional<Int8Rows> int8_rows_;
  c10::ScalarType merged_dtype_ = c10::kFloat;  // what it had as numbers
  Factor a_ = nullptr;
  Factor b_ = nullptr;
  double scale_ = 1;
  double dropout_ = 0;
};
TORCH_MODULE(Linear);

// weight += scale * b a, the product in the factors' dtype, and rounded once to
// the weight's, as PEFT's merge_and_unload() does.
void AddProduct(const at::Tensor& weight, const at::Tensor& a,
                const at::Tensor& b, double scale);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LINEAR_H_
