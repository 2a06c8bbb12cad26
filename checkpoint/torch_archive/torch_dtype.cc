#include "checkpoint/torch_archive/torch_dtype.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {
namespace {

constexpr absl::string_view kModule = "torch.";

constexpr TorchDtype kDtypes[] = {
    {Dtype::kBool, "bool", "BoolStorage"},
    {Dtype::kU8, "uint8", "ByteStorage"},
    {Dtype::kI8, "int8", "CharStorage"},
    {Dtype::kI16, "int16", "ShortStorage"},
    {Dtype::kI32, "int32", "IntStorage"},
    {Dtype::kI64, "int64", "LongStorage"},
    {Dtype::kF16, "float16", "HalfStorage"},
    {Dtype::kBF16, "bfloat16", "BFloat16Storage"},
    {Dtype::kF32, "float32", "FloatStorage"},
    {Dtype::kF64, "float64", "DoubleStorage"},
    {Dtype::kC64, "complex64", "ComplexFloatStorage"},
    {Dtype::kU16, "uint16", ""},
    {Dtype::kU32, "uint32", ""},
    {Dtype::kU64, "uint64", ""},
    {Dtype::kF8E5M2, "float8_e5m2", ""},
    {Dtype::kF8E4M3, "float8_e4m3fn", ""},
    {Dtype::kF8E8M0, "float8_e8m0fnu", ""},
    {Dtype::kF8E4M3Fnuz, "float8_e4m3fnuz", ""},
    {Dtype::kF8E5M2Fnuz, "float8_e5m2fnuz", ""},
};

bool IsInTorch(absl::string_view global, absl::string_view name) {
  return !name.empty() && global.size() == kModule.size() + name.size() &&
         global.substr(0, kModule.size()) == kModule &&
         global.substr(kModule.size()) == name;
}

}  // namespace

const TorchDtype* TorchDtypeOf(Dtype dtype) {
  for (const TorchDtype& entry : kDtypes) {
    if (entry.dtype == dtype) return &entry;
  }
  return nullptr;
}

const TorchDtype* TorchDtypeNamed(absl::string_view global) {
  for (const TorchDtype& entry : kDtypes) {
    if (IsInTorch(global, entry.name)) return &entry;
  }
  return nullptr;
}

const TorchDtype* TorchStorageNamed(absl::string_view global) {
  for (const TorchDtype& entry : kDtypes) {
    if (IsInTorch(global, entry.storage)) return &entry;
  }
  return nullptr;
}

void AddTorchDtypeNames(std::vector<std::string>& names) {
  for (const TorchDtype& entry : kDtypes) {
    names.push_back(absl::StrCat(kModule, entry.name));
  }
}

void AddTorchStorageNames(std::vector<std::string>& names) {
  for (const TorchDtype& entry : kDtypes) {
    if (entry.storage.empty()) continue;
    names.push_back(absl::StrCat(kModule, entry.storage));
  }
}

}  // namespace fsdp::checkpoint
