// What torch.save() keeps: Python values with tensors among them.
#ifndef CHECKPOINT_TORCH_ARCHIVE_VALUE_H_
#define CHECKPOINT_TORCH_ARCHIVE_VALUE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/tensor/dtype.h"

namespace fsdp::checkpoint {

// A view of a storage in a file.
struct ArchiveTensor {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements, of the shape's length
  int64_t storage_offset = 0;    // in elements
  std::string storage;           // its key: "0"
  int64_t storage_bytes = 0;
  int64_t file_offset = 0;  // of the storage's first byte, in the whole file

  // Are its elements row-major, without gaps?
  bool IsContiguous() const;
  // Of its first element, in the whole file.
  int64_t FirstByte() const {
    return file_offset + storage_offset * ItemBytes(dtype);
  }
};

// In Python's words: None, bool, int, float, str, tuple, list, dict in its
// order, Tensor.
struct Value {
  struct None {};
  struct Tuple {
    std::vector<Value> items;
  };
  struct List {
    std::vector<Value> items;
  };
  struct Dict {
    std::vector<std::pair<Value, Value>> items;
  };
  std::variant<None, bool, int64_t, double, std::string, Tuple, List, Dict,
               ArchiveTensor>
      is;

  // Null for what is none.
  const Dict* dict() const { return std::get_if<Dict>(&is); }
  const ArchiveTensor* tensor() const {
    return std::get_if<ArchiveTensor>(&is);
  }
  // The value of a key of a dict; null for none.
  const Value* Find(const std::string& key) const;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_VALUE_H_
