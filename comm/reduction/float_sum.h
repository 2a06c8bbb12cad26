// The sum that training spends its time on, by vector instructions.
#ifndef COMM_REDUCTION_FLOAT_SUM_H_
#define COMM_REDUCTION_FLOAT_SUM_H_

#include <cstdint>

#include "absl/types/span.h"

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

}  // namespace fsdp::comm

#endif  // COMM_REDUCTION_FLOAT_SUM_H_
