#include "checkpoint/torch_archive/value.h"

#include <string>
#include <utility>
#include <variant>

namespace fsdp::checkpoint {

bool ArchiveTensor::IsContiguous() const {
  for (const int64_t size : shape) {
    if (size == 0) return true;
  }
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    // Of a single element the stride does not matter.
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

const Value* Value::Find(const std::string& key) const {
  const Dict* const all = dict();
  if (all == nullptr) return nullptr;
  for (const auto& [name, value] : all->items) {
    const auto* const text = std::get_if<std::string>(&name.is);
    if (text != nullptr && *text == key) return &value;
  }
  return nullptr;
}

}  // namespace fsdp::checkpoint
