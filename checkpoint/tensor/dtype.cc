#include "checkpoint/tensor/dtype.h"

#include <array>

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

}  // namespace fsdp::checkpoint
