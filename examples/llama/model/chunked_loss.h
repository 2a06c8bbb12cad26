// The loss of a language model without its logits: those of a few tokens at a
// time.
#ifndef EXAMPLES_LLAMA_MODEL_CHUNKED_LOSS_H_
#define EXAMPLES_LLAMA_MODEL_CHUNKED_LOSS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace llama {

// Of targets that do not count.
inline constexpr int64_t kIgnoredTarget = -100;

// The mean cross entropy in nats of the logits `hidden` x `weight` transposed
// against `targets`, over targets that are not kIgnoredTarget; NaN where all
// are, with gradients of zero, as torch's cross_entropy has it.
//   hidden [tokens, dim], weight [vocab, dim], of one floating-point dtype
//   targets int64 [tokens], in [0, vocab) or kIgnoredTarget
// -> no dimensions, float64 for float64, otherwise float32, in which logits are
// reduced and gradients summed over chunks, losses in float64.
//
// The gradients are computed along with the loss, `chunk_rows` tokens at a
// time, and only scaled in backward: it comes next, so that they are no longer
// in memory for it, and the logits are multiplied once, not twice. Neither
// `weight` nor `hidden` is kept. Memory beyond the gradients: about 1.5 chunks
// of logits in bfloat16, one otherwise, and in bfloat16, until the loss is
// there, the gradient of `weight` in float32.
//
// Throws StatusError: InvalidArgument for other shapes and dtypes;
// Unimplemented in backward, for gradients of gradients. What a target outside
// of the vocabulary does is what at::gather does: it throws on CPUs.
at::Tensor ChunkedCrossEntropy(const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& targets,
                               int64_t chunk_rows = 512);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_CHUNKED_LOSS_H_
