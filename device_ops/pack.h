// Many small copies with a cast and a factor as one operator, which brings
// gradients into the buffer of a reduction.
#ifndef DEVICE_OPS_PACK_H_
#define DEVICE_OPS_PACK_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <map>
#include <vector>

namespace fsdp::device_ops {

// All tensors are contiguous, on one device, and of float32, float64, float16
// or bfloat16, each of its own dtype. Nothing is recorded for autograd.
// Products and sums are computed in the wider of the two dtypes; in float32 if
// both are halves, and then the factor is first rounded to that. The result is
// rounded to the dtype of `out` once, and the product in a sum to the dtype of
// the computation. The bits are the same on the CPU and on CUDA, so a mean over
// N ranks can be packed with the factor 1 / N and summed. Errors are
// c10::Error.
//
// The operator is in LibTorch's dispatcher (libtorch_fsdp::pack_), so the
// device of the tensors decides what runs. CUDA has its own kernels if
// //device_ops/cuda is linked; other devices run one operator of LibTorch for
// each piece.

// Says what goes where in a 1-D buffer. Overlapping ranges are a bug of the
// caller and stop the program; the check costs next to nothing if ranges come
// mostly in order.
class Packing {
 public:
  // AddPiece() adds out[out_begin + i] = scale * sources[source][source_begin +
  // i] for 0 <= i < numel. Zeros and ones are not scaled.
  void AddPiece(int64_t source, int64_t source_begin, int64_t out_begin,
                int64_t numel);
  void AddZeros(int64_t begin, int64_t end) {
    AddPiece(kZeros, 0, begin, end - begin);
  }
  void AddOnes(int64_t begin, int64_t end) {
    AddPiece(kOnes, 0, begin, end - begin);
  }

  // Four numbers for each piece, in the order of AddPiece(). These stand for a
  // source.
  static constexpr int64_t kZeros = -1;
  static constexpr int64_t kOnes = -2;
  c10::IntArrayRef pieces() const { return pieces_; }

 private:
  void Occupy(int64_t begin, int64_t end);

  std::vector<int64_t> pieces_;
  // Ends of ranges by their begins; one that touches the one before it extends
  // that.
  std::map<int64_t, int64_t> occupied_;
};

// Writes `out`, or adds what comes of sources to it, and sets the ones and
// zeros all the same. Sources have one dimension.
void Pack(const at::Tensor& out, at::TensorList sources, const Packing& packing,
          double scale, bool accumulate = false);

// Sets out = scale * in, or adds that to `out`; the sizes are equal. If the
// dtypes are equal too, the sum is LibTorch's add_(), which may or may not
// round the product.
void CopyScaled(const at::Tensor& out, const at::Tensor& in, double scale,
                bool accumulate = false);

// --- For kernels: the arguments of libtorch_fsdp::pack_ in the form that they
// use

constexpr size_t kNumbersOfPiece = 4;

// A range of `out`: elements of `source` or a constant for each out[begin + i],
// 0 <= i < numel.
struct PackedRange {
  const void* source;     // null: `value` everywhere
  c10::ScalarType dtype;  // of the source
  int64_t begin;
  int64_t numel;
  double value;
};

// Converts the operator's arguments; leaves out empty ranges.
std::vector<PackedRange> PackedRanges(at::TensorList sources,
                                      c10::IntArrayRef pieces);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_PACK_H_
