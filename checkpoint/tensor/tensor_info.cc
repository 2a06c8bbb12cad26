#include "checkpoint/tensor/tensor_info.h"

#include <array>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

struct Entry {
  absl::string_view name;
  int bits;
};

// By Dtype.
constexpr std::array<Entry, kNumDtypes> kEntries = {{
    {"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6},
    {"U8", 8},      {"I8", 8},          {"F8_E5M2", 8},     {"F8_E4M3", 8},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},        {"BF16", 16},       {"I32", 32},
    {"U32", 32},    {"F32", 32},        {"C64", 64},        {"F64", 64},
    {"I64", 64},    {"U64", 64},
}};

const Entry& EntryOf(Dtype dtype) {
  return kEntries[static_cast<size_t>(dtype)];
}

}  // namespace

absl::string_view NameOf(Dtype dtype) { return EntryOf(dtype).name; }

std::optional<Dtype> DtypeNamed(absl::string_view name) {
  for (int i = 0; i < kNumDtypes; ++i) {
    if (kEntries[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

int BitsOf(Dtype dtype) { return EntryOf(dtype).bits; }

int64_t ItemBytes(Dtype dtype) {
  const int bits = BitsOf(dtype);
  return bits % 8 == 0 ? bits / 8 : 0;
}

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
