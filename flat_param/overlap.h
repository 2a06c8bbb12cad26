// Tells whether tensors share memory.
#ifndef FLAT_PARAM_OVERLAP_H_
#define FLAT_PARAM_OVERLAP_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::flat_param {

// Two of `tensors`, by index, between whose first and last elements the other
// one has some; nullopt: none do. Empty tensors share nothing.
std::optional<std::pair<size_t, size_t>> FindOverlap(
    const std::vector<at::Tensor>& tensors);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_OVERLAP_H_
