// Reads and writes buffers of any layout, also expanded, lazily conjugated and
// sparse ones. Parameters are always dense.
#ifndef FSDP_MEMORY_BUFFER_LAYOUT_H_
#define FSDP_MEMORY_BUFFER_LAYOUT_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace fsdp {

// Checks that rank 0 can send `buffer` to others. InvalidArgument, with its
// name: it is on the meta device, its layout is neither strided nor sparse, or
// it is a view whose elements may share memory in other ways than by expand().
absl::Status CheckCanBeSent(const std::string& name, const at::Tensor& buffer);

// Returns the strided tensors that `buffer` is made of: itself, or the indices
// and the values of a sparse one. Writing them writes the buffer.
std::vector<at::Tensor> PartsOf(const at::Tensor& buffer);

// Returns a view of the distinct elements of a strided `tensor`: one along each
// dimension in which it is expanded.
at::Tensor DistinctOf(const at::Tensor& tensor);

// Returns whether no two elements of a strided `tensor` can share memory.
bool SharesNoElements(const at::Tensor& tensor);

// Returns whether `target` can hold `value`, which has its sizes: `value` has
// to be constant along the dimensions in which `target` is expanded.
bool CanHold(const at::Tensor& target, const at::Tensor& value);
// Copies a `value` that `target` can hold; the caller has autograd off.
void CopyInto(const at::Tensor& target, const at::Tensor& value);

// Returns "strided", or "sparse" with the sizes of the parts. Ranks whose texts
// are equal can send each other the parts.
std::string LayoutText(const at::Tensor& buffer);

}  // namespace fsdp

#endif  // FSDP_MEMORY_BUFFER_LAYOUT_H_
