// Numbers in the bytes of tensors.
#ifndef TOOLS_CHECKPOINT_ELEMENTS_H_
#define TOOLS_CHECKPOINT_ELEMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/tensor/dtype.h"

namespace fsdp::checkpoint::tool {

// F64, F32, BF16, F16, integers and BOOL: what there are figures of.
bool IsNumber(Dtype dtype);

// IEEE 754's binary16, and the upper half of binary32.
double FromF16(uint16_t bits);
double FromBF16(uint16_t bits);

// Adds the elements that `bytes` are. Exact, but for integers of more than 53
// bits. `dtype`: IsNumber(); `bytes`: of whole elements, at any address.
void AppendNumbers(Dtype dtype, absl::Span<const char> bytes,
                   std::vector<double>& out);

// Of one element, in full; as hexadecimal bytes where !IsNumber().
std::string ElementText(Dtype dtype, absl::string_view bytes);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_ELEMENTS_H_
