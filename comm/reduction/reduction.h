// The arithmetic of reductions, for all backends that reduce by themselves.
#ifndef COMM_REDUCTION_REDUCTION_H_
#define COMM_REDUCTION_REDUCTION_H_

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "absl/types/span.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// The way in which results are written to memory.
enum class Stores {
  kCached,
  // Writes past the caches where the machine can. This is faster for results
  // that are not read again soon. `out` may not be an input then.
  kPastCaches,
};

// Sets out[i] to scale * (inputs[0][i] + inputs[1][i] + ...), or adds that to
// out[i], with vector instructions where the machine has them. It adds from
// left to right and rounds after each operation, so that the bits do not depend
// on the machine. There is at least one input. `out` may be one of the inputs;
// it may not overlap them otherwise.
void SumFloats(absl::Span<const float* const> inputs, int64_t count,
               float scale, bool accumulate, Stores stores, float* out);

// Sets out[i] = inputs[0][i] op inputs[1][i] op ..., left to right, for
// i < count. float16 and bfloat16 are summed in float32 and rounded once, so
// that the result depends on the inputs and their order alone. Integers wrap; a
// NaN in any input gives NaN. There is at least one input, and `dtype` is one
// that Communicator takes. `out` may be one of the inputs; it may not overlap
// them otherwise. Pointers are aligned to the element.
void Reduce(at::ScalarType dtype, ReduceOp op,
            absl::Span<const void* const> inputs, int64_t count, void* out);

// Sets out[i] = scale * sum, or out[i] += scale * sum, where sum is the result
// of Reduce() with kSum, rounded to `dtype`. Both dtypes are floating-point;
// the product is computed in float64 where one of them is that, else in
// float32. `out` does not overlap the inputs. `stores` counts only where both
// are float32.
void SumScaled(at::ScalarType dtype, absl::Span<const void* const> inputs,
               int64_t count, double scale, bool accumulate,
               at::ScalarType out_dtype, Stores stores, void* out);

}  // namespace fsdp::comm

#endif  // COMM_REDUCTION_REDUCTION_H_
