// Buffers that are no dense tensors with memory of their own: expanded, lazily
// conjugated, sparse. Parameters never are.
#ifndef FSDP_MEMORY_BUFFER_LAYOUT_H_
#define FSDP_MEMORY_BUFFER_LAYOUT_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace fsdp {

// InvalidArgument, naming the buffer, where it cannot be sent from rank 0: on
// the meta device, of another layout than strided and sparse ones, or a view
// whose elements may share memory otherwise than by expand().
absl::Status CheckCanBeSent(const std::string& name, const at::Tensor& buffer);

// The strided tensors over whose memory `buffer` lies: itself, or the indices
// and the values of a sparse one. Writing them writes the buffer.
std::vector<at::Tensor> PartsOf(const at::Tensor& buffer);

// The elements of a strided `tensor` that are distinct: one along each
// dimension in which it is expanded.
at::Tensor DistinctOf(const at::Tensor& tensor);

// Whether `target` can hold `value`, of its sizes: along dimensions in which it
// is expanded, all of `value` is equal.
bool CanHold(const at::Tensor& target, const at::Tensor& value);
// Copies a value that it can hold; autograd is off.
void CopyInto(const at::Tensor& target, const at::Tensor& value);

// "strided", or the layout and the sizes of the parts: ranks whose texts are
// equal can send each other the parts.
std::string LayoutText(const at::Tensor& buffer);

}  // namespace fsdp

#endif  // FSDP_MEMORY_BUFFER_LAYOUT_H_
