// The arithmetic of reductions, the same for every backend that does its own.
#ifndef COMM_REDUCTION_REDUCTION_H_
#define COMM_REDUCTION_REDUCTION_H_

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "absl/types/span.h"
#include "comm/call.h"

// The sum that training spends its time on, by vector instructions.

namespace fsdp::comm {

// Where what is written goes.
enum class Stores {
  kCached,
  // Past the caches: it is not read again soon, and what it replaces need not
  // be read either. Where the machine can; `out` is no input then.
  kPastCaches,
};

// out[i] = scale * (inputs[0][i] + inputs[1][i] + ...), or that added to
// out[i]; left to right, rounded after each operation, so that the bits do not
// depend on the machine. At least one input; `out` may be one of them and may
// not overlap them otherwise.
void SumFloats(absl::Span<const float* const> inputs, int64_t count,
               float scale, bool accumulate, Stores stores, float* out);

// out[i] = inputs[0][i] op inputs[1][i] op ..., left to right, i < count.
// float16 and bfloat16 are summed in float32 and rounded once, so the result
// depends on nothing but the inputs and their order. Integers wrap; a NaN in
// any input gives NaN. At least one input; `dtype` is one that Communicator
// takes. `out` may be one of the inputs and may not overlap them otherwise.
// Pointers are aligned to the element.
void Reduce(at::ScalarType dtype, ReduceOp op,
            absl::Span<const void* const> inputs, int64_t count, void* out);

// out[i] = scale * sum, or out[i] += scale * sum, where sum is what Reduce()
// makes of the inputs with kSum, rounded to `dtype`. Both dtypes are
// floating-point; computed in float64 where one of them is that, else in
// float32. `out` does not overlap the inputs. `stores` is heeded for float32.
void SumScaled(at::ScalarType dtype, absl::Span<const void* const> inputs,
               int64_t count, double scale, bool accumulate,
               at::ScalarType out_dtype, Stores stores, void* out);

}  // namespace fsdp::comm

#endif  // COMM_REDUCTION_REDUCTION_H_
