#include "comm/nccl_scaled_sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace fsdp::comm {
namespace {

bool IsOf(double scale, at::ScalarType dtype) {
  const auto rounded = static_cast<float>(scale);
  switch (dtype) {
    case at::ScalarType::Half:
      return static_cast<float>(c10::Half(rounded)) == scale;
    case at::ScalarType::BFloat16:
      return static_cast<float>(c10::BFloat16(rounded)) == scale;
    default:
      return true;  // rounds as a multiplication in that dtype would
  }
}

}  // namespace

NcclScaling SpreadScale(double scale, at::ScalarType dtype, int world_size) {
  if (world_size > 1 && IsOf(scale, dtype)) return {scale, 1};
  return {1, scale};
}

}  // namespace fsdp::comm
