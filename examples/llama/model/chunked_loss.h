// Computes the loss of a language model from the logits of a few tokens at a
// time.
#ifndef EXAMPLES_LLAMA_MODEL_CHUNKED_LOSS_H_
#define EXAMPLES_LLAMA_MODEL_CHUNKED_LOSS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace llama {

// Targets of this value do not count.
inline constexpr int64_t kIgnoredTarget = -100;

// Returns the mean cross entropy in nats of the logits `hidden` x `weight`
// transposed against `targets`, over targets that are not kIgnoredTarget. If
// all are, it is NaN with gradients of zero, as in torch's cross_entropy.
//   hidden [tokens, dim], weight [vocab, dim], of one floating-point dtype
//   targets int64 [tokens], in [0, vocab) or kIgnoredTarget
// The result has no dimensions. It is float64 for float64, otherwise float32.
// Logits and the losses of a chunk are reduced in that dtype, and gradients
// summed over chunks in it; the sums of chunks are added in float64.
//
// The gradients are computed along with the loss, `chunk_rows` tokens at a
// time, and backward only scales them: it comes next, so nothing else is in
// memory for it, and logits are multiplied once, not twice. Neither `weight`
// nor `hidden` is kept. Memory besides the gradients: one chunk of logits, and
// in bfloat16 one more in float32 where device_ops has no kernel; and in
// bfloat16, until the loss is there, the gradient of `weight` in float32.
//
// Throws StatusError (Unimplemented) in backward, if gradients of gradients are
// asked for. For a target outside of the vocabulary it does what
// fsdp::device_ops::CrossEntropyOfRows() does, which throws on CPUs.
at::Tensor ChunkedCrossEntropy(const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& targets,
                               int64_t chunk_rows = 512);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_CHUNKED_LOSS_H_
