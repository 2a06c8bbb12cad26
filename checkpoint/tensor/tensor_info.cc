#include "checkpoint/tensor/tensor_info.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

absl::Status Refuse(const TensorInfo& tensor, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor \"", tensor.name, "\", ", ToString(tensor), ": ", why));
}

}  // namespace

absl::StatusOr<int64_t> NumelOf(const TensorInfo& tensor) {
  bool empty = false;
  for (const int64_t size : tensor.shape) {
    if (size < 0) return Refuse(tensor, "a negative size");
    empty |= size == 0;
  }
  if (empty) return 0;
  int64_t numel = 1;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(numel, size, &numel)) {
      return Refuse(tensor, "its elements are more than 64 bits count");
    }
  }
  return numel;
}

absl::StatusOr<int64_t> BytesOf(const TensorInfo& tensor) {
  FSDP_ASSIGN_OR_RETURN(int64_t bits, NumelOf(tensor));
  if (__builtin_mul_overflow(bits, int64_t{BitsOf(tensor.dtype)}, &bits)) {
    return Refuse(tensor, "its bits are more than 64 bits count");
  }
  if (bits % 8 != 0) return Refuse(tensor, "does not come to whole bytes");
  return bits / 8;
}

std::string ToString(const TensorInfo& tensor) {
  return absl::StrCat(NameOf(tensor.dtype), "[",
                      absl::StrJoin(tensor.shape, ", "), "]");
}

}  // namespace fsdp::checkpoint
