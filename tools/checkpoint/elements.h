// Numbers in the bytes of tensors, and casts between them.
#ifndef TOOLS_CHECKPOINT_ELEMENTS_H_
#define TOOLS_CHECKPOINT_ELEMENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/tensor/dtype.h"

namespace fsdp::checkpoint::tool {

// F64, F32, BF16, F16: what can be cast into each other.
bool IsFloat(Dtype dtype);
// These, integers and BOOL: what there are figures of.
bool IsNumber(Dtype dtype);

// IEEE 754's binary16, and the upper half of binary32. Rounded to nearest, ties
// to even, once; what is too large becomes infinite; NaN stays NaN, quiet and
// of its sign.
uint16_t ToF16(double value);
uint16_t ToBF16(double value);
double FromF16(uint16_t bits);
double FromBF16(uint16_t bits);

// Adds the elements that `bytes` are. Exact, but for integers of more than 53
// bits. `dtype`: IsNumber(); `bytes`: of whole elements, at any address.
void AppendNumbers(Dtype dtype, absl::Span<const char> bytes,
                   std::vector<double>& out);

// Adds the bytes of the elements in `to`. Returns the first finite one that is
// too large for it, if any. Both: IsFloat().
std::optional<double> AppendCast(Dtype from, absl::Span<const char> bytes,
                                 Dtype to, std::string& out);

// Of one element, in full; as hexadecimal bytes where !IsNumber().
std::string ElementText(Dtype dtype, absl::string_view bytes);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_ELEMENTS_H_
