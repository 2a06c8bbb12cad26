// Parts of a transformer's layers, and its loss, each as one operator where
// LibTorch takes several that read and write all of their numbers.
#ifndef DEVICE_OPS_FUSED_LAYERS_H_
#define DEVICE_OPS_FUSED_LAYERS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::device_ops {

// Numbers are float32, float64, float16 or bfloat16. The operators are in
// LibTorch's dispatcher (libtorch_fsdp::rotate_halves_, swiglu_,
// swiglu_backward_ and cross_entropy_). CUDA has kernels of its own if
// //device_ops/cuda is linked: they compute in float32, float64 in float64, and
// round each result once. On other devices operators of LibTorch run, each of
// which rounds to the dtype of the numbers. Errors are c10::Error.

// Returns `x` [batch, heads, tokens, dim], turned by a rotary position
// embedding: element i is paired with element j = i + dim / 2, and becomes
//   x[i] * cos[i] - x[j] * sin[i]  and  x[j] * cos[j] + x[i] * sin[j].
// `cos` and `sin` are [tokens, dim], of one dtype, and get no gradient. The
// result has the wider dtype of theirs and of `x`, and lies in memory as `x`
// does, which may be any view in which elements of a head are neighbours.
at::Tensor RotateHalves(const at::Tensor& x, const at::Tensor& cos,
                        const at::Tensor& sin);

// Returns silu(gate) * up; the two have one shape and dtype. Nothing but them
// is kept for backward.
at::Tensor SwiGlu(const at::Tensor& gate, const at::Tensor& up);

// Returns the cross entropy in nats of each row of `logits`, [rows, classes]
// and contiguous, against `targets`, int64 [rows] in [0, classes) or `ignored`,
// whose rows have 0. It is float64 for float64, otherwise float32, and so is
// what is computed before it is rounded to the dtype of the logits. The logits
// become their gradient, the softmax minus one at the target and zero in
// ignored rows, or without `gradient` anything. Nothing is recorded for
// autograd. For any other target CUDA's kernel gives the loss NaN; otherwise
// at::gather() throws on CPUs.
at::Tensor CrossEntropyOfRows(const at::Tensor& logits,
                              const at::Tensor& targets, int64_t ignored,
                              bool gradient);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_FUSED_LAYERS_H_
