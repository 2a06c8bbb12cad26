// What is to be filled from files.
#ifndef CHECKPOINT_LOAD_LOAD_TARGET_H_
#define CHECKPOINT_LOAD_LOAD_TARGET_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace fsdp::checkpoint {

struct LoadTarget {
  std::string name;                       // in the model
  std::vector<std::string> aliases = {};  // any of them will do
  std::vector<int64_t> sizes;             // of the whole tensor
  // Of the value, without mixed precision. Only floating-point values are cast.
  c10::ScalarType dtype = c10::kFloat;
  // The elements from `begin` on, row-major: 1-D, of any dtype and device,
  // maybe resting, maybe empty. Undefined: only take_whole() can fill it.
  at::Tensor values;
  int64_t begin = 0;
  // Gets the whole tensor, on the CPU, in `dtype`.
  std::function<absl::Status(const at::Tensor& whole)> take_whole;
  // Targets of a unit are in memory together where they rest elsewhere.
  int unit = 0;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_LOAD_TARGET_H_
