// Elements of tensors out of the files in which they lie, in their order and in
// O(buffer) memory.
#ifndef TOOLS_CHECKPOINT_TENSOR_STREAM_H_
#define TOOLS_CHECKPOINT_TENSOR_STREAM_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/range_reader.h"

namespace fsdp::checkpoint::tool {

using TakeBytes = absl::FunctionRef<absl::Status(absl::Span<const char>)>;

// Gives `take` the elements [begin, end) of a tensor, row-major, in pieces of
// whole elements. Elements that do not fill bytes have to be all there are.
// InvalidArgument for others, and the errors of RangeReader and of `take`.
absl::Status StreamElements(RangeReader& reader, const StoredTensor& tensor,
                            int64_t begin, int64_t end, TakeBytes take);

// All of it.
absl::Status StreamTensor(RangeReader& reader, const StoredTensor& tensor,
                          TakeBytes take);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TENSOR_STREAM_H_
