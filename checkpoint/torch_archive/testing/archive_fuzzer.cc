#include "checkpoint/torch_archive/testing/archive_fuzzer.h"

#include <cstddef>
#include <cstdint>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "checkpoint/torch_archive/archive_reader.h"
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint {
namespace {

void Check(const Value& value, int64_t file_bytes) {
  if (const ArchiveTensor* const tensor = value.tensor()) {
    FSDP_CHECK(tensor->file_offset >= 0 && tensor->storage_bytes >= 0);
    FSDP_CHECK(tensor->file_offset <= file_bytes - tensor->storage_bytes);
    FSDP_CHECK(tensor->shape.size() == tensor->strides.size());
  } else if (const Value::Dict* const dict = value.dict()) {
    for (const auto& [key, item] : dict->items) {
      Check(key, file_bytes);
      Check(item, file_bytes);
    }
  } else if (const auto* const list = std::get_if<Value::List>(&value.is)) {
    for (const Value& item : list->items) Check(item, file_bytes);
  } else if (const auto* const tuple = std::get_if<Value::Tuple>(&value.is)) {
    for (const Value& item : tuple->items) Check(item, file_bytes);
  }
}

}  // namespace
}  // namespace fsdp::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fsdp::checkpoint::Value;
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<Value> value = fsdp::checkpoint::ReadArchive(
      fsdp::checkpoint::testing::ReadFrom(file), 0, static_cast<int64_t>(size));
  if (value.ok()) {
    fsdp::checkpoint::Check(*value, static_cast<int64_t>(size));
  }
  return 0;
}
