#include "checkpoint/torch_archive/archive_pickle.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/pickle/pickler.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/torch_dtype.h"

namespace fsdp::checkpoint {
namespace {

constexpr int kMaxDepth = 100;

class Writer {
 public:
  absl::Status Write(const Value& value, int depth) {
    if (depth > kMaxDepth) {
      return absl::InvalidArgumentError(absl::StrCat(
          "torch.save file: values lie more than ", kMaxDepth, " deep"));
    }
    depth_ = depth;
    return std::visit([this](const auto& is) { return WriteOne(is); },
                      value.is);
  }

  ArchivePickle Finish() && {
    return {std::move(pickler_).Finish(), std::move(storage_bytes_)};
  }

 private:
  absl::Status WriteOne(Value::None) {
    pickler_.None();
    return absl::OkStatus();
  }
  absl::Status WriteOne(bool value) {
    pickler_.Bool(value);
    return absl::OkStatus();
  }
  absl::Status WriteOne(int64_t value) {
    pickler_.Int(value);
    return absl::OkStatus();
  }
  absl::Status WriteOne(double value) {
    pickler_.Double(value);
    return absl::OkStatus();
  }
  absl::Status WriteOne(const std::string& value) {
    pickler_.String(value);
    return absl::OkStatus();
  }

  absl::Status WriteOne(const Value::Tuple& tuple) {
    pickler_.Mark();
    FSDP_RETURN_IF_ERROR(WriteItems(tuple.items));
    pickler_.Tuple();
    return absl::OkStatus();
  }

  absl::Status WriteOne(const Value::List& list) {
    pickler_.EmptyList();
    pickler_.Mark();
    FSDP_RETURN_IF_ERROR(WriteItems(list.items));
    pickler_.Appends();
    return absl::OkStatus();
  }

  absl::Status WriteOne(const Value::Dict& dict) {
    const int depth = depth_;
    pickler_.EmptyDict();
    pickler_.Mark();
    for (const auto& [key, value] : dict.items) {
      FSDP_RETURN_IF_ERROR(Write(key, depth + 1));
      FSDP_RETURN_IF_ERROR(Write(value, depth + 1));
    }
    pickler_.SetItems();
    return absl::OkStatus();
  }

  absl::Status WriteItems(const std::vector<Value>& items) {
    const int depth = depth_;
    for (const Value& item : items) {
      FSDP_RETURN_IF_ERROR(Write(item, depth + 1));
    }
    return absl::OkStatus();
  }

  absl::Status WriteOne(const ArchiveTensor& tensor) {
    const TorchDtype* const dtype = TorchDtypeOf(tensor.dtype);
    if (dtype == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("torch.save file: PyTorch has no such dtype as ",
                       NameOf(tensor.dtype)));
    }
    const std::string key = absl::StrCat(storage_bytes_.size());
    const TensorInfo info = {key, tensor.dtype, tensor.shape};
    FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(info));
    storage_bytes_.push_back(bytes);
    const bool is_untyped = dtype->storage.empty();
    pickler_.Global("torch._utils",
                    is_untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    pickler_.Mark();
    WriteStorage(*dtype, key, bytes);
    pickler_.Int(0);  // where it begins there
    WriteShape(tensor.shape);
    pickler_.Bool(false);                           // requires_grad
    pickler_.Global("collections", "OrderedDict");  // hooks
    pickler_.EmptyTuple();
    pickler_.Reduce();
    if (is_untyped) pickler_.Global("torch", dtype->name);
    pickler_.Tuple();
    pickler_.Reduce();
    return absl::OkStatus();
  }

  void WriteStorage(const TorchDtype& dtype, const std::string& key,
                    int64_t bytes) {
    const bool is_untyped = dtype.storage.empty();
    pickler_.Mark();
    pickler_.String("storage");
    pickler_.Global(is_untyped ? "torch.storage" : "torch",
                    is_untyped ? "UntypedStorage" : dtype.storage);
    pickler_.String(key);
    pickler_.String("cpu");
    pickler_.Int(is_untyped ? bytes : bytes / ItemBytes(dtype.dtype));
    pickler_.Tuple();
    pickler_.PersistentId();
  }

  // And the strides, those that PyTorch gives to new tensors.
  void WriteShape(const std::vector<int64_t>& shape) {
    pickler_.Mark();
    for (const int64_t size : shape) pickler_.Int(size);
    pickler_.Tuple();
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size(); i-- > 1;) {
      // Does not overflow where the shape has elements.
      const int64_t below = shape[i] == 0 ? 1 : shape[i];
      if (__builtin_mul_overflow(strides[i], below, &strides[i - 1])) {
        strides[i - 1] = 1;
      }
    }
    pickler_.Mark();
    for (const int64_t stride : strides) pickler_.Int(stride);
    pickler_.Tuple();
  }

  Pickler pickler_{2};
  std::vector<int64_t> storage_bytes_;
  int depth_ = 0;  // of the value that is being written
};

}  // namespace

absl::StatusOr<ArchivePickle> PickleArchive(const Value& value) {
  Writer writer;
  FSDP_RETURN_IF_ERROR(writer.Write(value, 1));
  return std::move(writer).Finish();
}

}  // namespace fsdp::checkpoint
