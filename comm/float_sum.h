// The sum that training spends its time on, by vector instructions.
#ifndef COMM_FLOAT_SUM_H_
#define COMM_FLOAT_SUM_H_

#include <cstdint>

#include "absl/types/span.h"

namespace fsdp::comm {

// out[i] = scale * (inputs[0][i] + inputs[1][i] + ...), or that added to
// out[i]; left to right, rounded after each operation, so that the bits do not
// depend on the machine. At least one input; `out` may be one of them and may
// not overlap them otherwise.
void SumFloats(absl::Span<const float* const> inputs, int64_t count,
               float scale, bool accumulate, float* out);

}  // namespace fsdp::comm

#endif  // COMM_FLOAT_SUM_H_
