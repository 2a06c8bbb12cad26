// A linear layer that learns by a low-rank adapter while its own weight, which
// may be int8, is frozen.
#ifndef ADAPTERS_LINEAR_H_
#define ADAPTERS_LINEAR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

namespace fsdp::adapters {

// Rows of numbers as bytes, int8 with one scale for each block of a row, which
// is how an int8 base keeps its weights.

// A layout in which one row of `numel` numbers has these bytes:
//   | an int8 for each number | zeros up to a multiple of 4 | float32 scales |
// with a scale for each `block` numbers, the last of which may be fewer. A row
// depends on no other row, so each row of a file can be converted alone.
struct Int8Rows {
  // Returns a layout with even blocks of at most `most` numbers. The length of
  // a row tells its blocks, and so where they begin; rows with other blocks
  // have another shape.
  static Int8Rows Of(int64_t numel, int64_t most);

  int64_t numel = 0;  // at least 1
  int64_t block = 0;  // in [1, device_ops::kMaxBlock]

  int64_t row_bytes() const;  // bytes of one row, scales and padding included
};

// Converts rows [n, numel], floating-point, to uint8 [n, row_bytes()], rounding
// as device_ops::Quantize() does: no number is off by more than half of its
// block's scale, 1/254 of the block's largest. A block with a number that is
// not finite has the scale NaN.
at::Tensor Pack(const Int8Rows& layout, const at::Tensor& rows);

// Converts back to [n, numel], rounding once to `dtype`.
at::Tensor Unpack(const Int8Rows& layout, const at::Tensor& packed,
                  c10::ScalarType dtype);

// Returns a view of the scales, float32 [n, blocks of a row].
at::Tensor ScalesOf(const Int8Rows& layout, const at::Tensor& packed);

// Returns y = x W^T + bias, [..., in] -> [..., out], as at::linear() computes
// it, where W is Unpack(layout, weight) in the dtype of x. Forward and backward
// each make W again and keep neither W nor x, so that one matrix exists at a
// time. The weight gets no gradient; `bias` may be undefined, and gets one if
// it requires it. Throws StatusError (FailedPrecondition) if the weight is not
// such bytes, for example after a module's to(dtype).
at::Tensor Int8Linear(const Int8Rows& layout, const at::Tensor& x,
                      const at::Tensor& weight, const at::Tensor& bias);

// The size of one adapter, whose parameters are float32 whatever the weight is.
struct LowRankOptions {
  int64_t rank = 8;    // at least 1
  double scale = 1;    // factor of what the adapter adds
  double dropout = 0;  // of the adapter's inputs, in training mode; in [0, 1)
};

// One factor of an adapter, the parameter "weight" [out, in]. It is no
// torch::nn::Linear, so that no policy makes it a unit.
class FactorImpl : public torch::nn::Module {
 public:
  FactorImpl(int64_t in, int64_t out, const at::TensorOptions& options);

  at::Tensor weight;  // without values until LinearImpl gives it some
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
  // LowRankOptions::scale of the adapter; 1 if there is none.
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
