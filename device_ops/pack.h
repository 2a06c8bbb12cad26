// Many small copies with a cast and a factor as one operator: how gradients get
// into the buffer of a reduction.
#ifndef DEVICE_OPS_PACK_H_
#define DEVICE_OPS_PACK_H_

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace fsdp::device_ops {

// All tensors here are contiguous, on one device and of float32, float64,
// float16 or bfloat16, each of its own. Nothing is recorded for autograd. What
// is multiplied or added is computed in the wider of the two dtypes, in float32
// where both are halves, to which the factor is rounded first; the result is
// rounded to the dtype of `out` once, and a sum's product to the dtype of the
// computation. The bits are the same on the CPU and on CUDA. So a mean over N
// ranks can be packed with the factor 1 / N and summed. Errors are c10::Error.
//
// The operators are LibTorch's dispatcher's (libtorch_fsdp::pack_): the device
// of the tensors decides what runs. CUDA has kernels of its own where
// //device_ops/cuda is linked; other devices get one operator of LibTorch for
// each piece.

// What goes where in a 1-D buffer. To add what overlaps something added before
// is a bug of the caller, which stops the program; it costs nothing to speak of
// where ranges come mostly in order.
class Packing {
 public:
  // out[out_begin + i] = scale * sources[source][source_begin + i], for each
  // 0 <= i < numel. Zeros and ones are not scaled.
  void AddPiece(int64_t source, int64_t source_begin, int64_t out_begin,
                int64_t numel);
  void AddZeros(int64_t begin, int64_t end);
  void AddOnes(int64_t begin, int64_t end);

  // Four numbers for each piece, as above; two for each range.
  c10::IntArrayRef pieces() const { return pieces_; }
  c10::IntArrayRef zeros() const { return zeros_; }
  c10::IntArrayRef ones() const { return ones_; }

 private:
  struct Range {
    int64_t begin;
    int64_t end;
  };

  void Occupy(int64_t begin, int64_t end);

  std::vector<int64_t> pieces_;
  std::vector<int64_t> zeros_;
  std::vector<int64_t> ones_;
  std::vector<Range> occupied_;  // in order; those that touch are one
};

// Sources have one dimension.
void Pack(const at::Tensor& out, at::TensorList sources, const Packing& packing,
          double scale);

// The same, but the pieces are added to what `out` holds.
void PackAdd(const at::Tensor& out, at::TensorList sources,
             const Packing& packing, double scale);

// out = scale * in and out += scale * in, of equal size. Of one dtype, the
// latter is LibTorch's add_(), which may or may not round the product.
void CopyScaled(const at::Tensor& out, const at::Tensor& in, double scale);
void AddScaled(const at::Tensor& out, const at::Tensor& in, double scale);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_PACK_H_
