// A linear layer that learns by a low-rank adapter while its own weight is
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
  double scale = 1;    // factor of what the adapter adds
  double dropout = 0;  // of the adapter's inputs, in training mode; in [0, 1)
  // The dtype of the adapter's parameters, whatever the weight's is.
  c10::ScalarType dtype = c10::kFloat;
};

// One factor of an adapter, the parameter "weight" [out, in]. It is no
// torch::nn::Linear, so that no policy makes it a unit.
class FactorImpl : public torch::nn::Module {
 public:
  FactorImpl(int64_t in, int64_t out, const at::TensorOptions& options);

  at::Tensor weight;
};
TORCH_MODULE(Factor);

// A torch::nn::Linear with the same parameters, for models to use instead. With
// an adapter (LoRA: Hu et al. 2021, arXiv:2106.09685) it computes
//   y = x W^T + b + scale * dropout(x) A^T B^T,
// where A is the parameter "lora_A.weight" [rank, in] and B "lora_B.weight"
// [out, rank], as Python's PEFT names them. A begins as random as a Linear's
// weight and B as zero, so the adapter changes nothing until it has learned.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  // Maps x [..., in] to [..., out]. The result has the dtype that the layer
  // without an adapter gives; the factors see x in their own dtype.
  at::Tensor forward(const at::Tensor& x);

  // Adds an adapter, on the weight's device. Call it at most once; the weight
  // may be int8.
  void AddLowRank(const LowRankOptions& options);
  bool has_low_rank() const { return !a_.is_empty(); }
  double low_rank_scale() const { return scale_; }
  // Adds what the adapter has learned to the weight, and makes B zero. An int8
  // weight becomes numbers again.
  void Merge();

  // Makes the weight int8 and frozen; call it at most once. At most `block`
  // numbers of a row share a scale. The parameter "weight" becomes Pack() of
  // its value, uint8 [out, bytes of a row], and the layer computes as
  // Int8Linear().
  void Quantize(int64_t block);
  // Returns the layout of an int8 weight; unset if the weight is numbers.
  const std::optional<Int8Rows>& int8_rows() const { return int8_rows_; }
  // Returns the weight in `dtype`, [out, in].
  at::Tensor WeightIn(c10::ScalarType dtype) const;

 private:
  std::optional<Int8Rows> int8_rows_;
  c10::ScalarType merged_dtype_ = c10::kFloat;  // the weight's as numbers
  Factor a_ = nullptr;
  Factor b_ = nullptr;
  double scale_ = 1;
  double dropout_ = 0;
};
TORCH_MODULE(Linear);

// Does weight += scale * b a. The product is computed in the factors' dtype and
// rounded once to the weight's, as PEFT's merge_and_unload() does.
void AddProduct(const at::Tensor& weight, const at::Tensor& a,
                const at::Tensor& b, double scale);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LINEAR_H_
