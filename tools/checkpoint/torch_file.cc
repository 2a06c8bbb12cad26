#include "tools/checkpoint/torch_file.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_names.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_reader.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint::tool {
namespace {

std::string KeyText(const Value& key) {
  if (const auto* const text = std::get_if<std::string>(&key.is)) return *text;
  if (const auto* const number = std::get_if<int64_t>(&key.is)) {
    return absl::StrCat(*number);
  }
  return "?";
}

// Walks a value, which is no deeper than archives are.
class Walker {
 public:
  explicit Walker(TorchFile& file) : file_(file) {}

  absl::Status Walk(const std::string& name, const Value& value) {
    if (const auto* const dict = value.dict()) {
      for (const auto& [key, item] : dict->items) {
        FSDP_RETURN_IF_ERROR(Walk(Join(name, KeyText(key)), item));
      }
      return absl::OkStatus();
    }
    if (const auto* const list = std::get_if<Value::List>(&value.is)) {
      return WalkItems(name, list->items);
    }
    if (const auto* const tuple = std::get_if<Value::Tuple>(&value.is)) {
      return WalkItems(name, tuple->items);
    }
    if (value.tensor() != nullptr) return Add(name, *value.tensor());
    file_.others.push_back(name.empty() ? "value" : name);
    return absl::OkStatus();
  }

 private:
  static std::string Join(const std::string& name, const std::string& key) {
    return name.empty() ? key : absl::StrCat(name, ".", key);
  }

  absl::Status WalkItems(const std::string& name,
                         const std::vector<Value>& items) {
    for (size_t i = 0; i < items.size(); ++i) {
      FSDP_RETURN_IF_ERROR(Walk(Join(name, absl::StrCat(i)), items[i]));
    }
    return absl::OkStatus();
  }

  absl::Status Add(const std::string& name, const ArchiveTensor& tensor) {
    StoredTensor stored;
    stored.info = {name.empty() ? "tensor" : name, tensor.dtype, tensor.shape};
    if (!tensor.IsContiguous()) {
      file_.unreadable.push_back(
          absl::StrCat(stored.info.name, ": its strides [",
                       absl::StrJoin(tensor.strides, ", "),
                       "] are not row-major: save it with .contiguous()"));
      return absl::OkStatus();
    }
    StoredBox box;
    box.offsets.assign(tensor.shape.size(), 0);
    box.sizes = tensor.shape;
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(stored.info));
    if (numel > 0) box.offset = tensor.FirstByte();
    stored.boxes.push_back(std::move(box));
    return file_.catalog.AddTensor(std::move(stored));
  }

  TorchFile& file_;
};

absl::Status InFile(const std::string& path, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(path, ": ", status.message()));
}

}  // namespace

absl::StatusOr<bool> IsTorchFile(FileSystem& files, const std::string& path) {
  constexpr absl::string_view kBegin = "PK\x03\x04";
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        files.OpenForReading(path, Caching::kCached));
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, file->Size());
  if (bytes < static_cast<int64_t>(kBegin.size())) return false;
  std::string begin(kBegin.size(), '\0');
  FSDP_RETURN_IF_ERROR(file->PRead(0, absl::MakeSpan(begin)));
  // A pickle of a long integer, its magic number.
  if (begin != "\x80\x02\x8a\x0a") return begin == kBegin;
  return InFile(path,
                absl::InvalidArgumentError(
                    "is a file of torch.save() of before PyTorch 1.6: "
                    "torch.load() it in Python and torch.save() it again"));
}

absl::StatusOr<TorchFile> ReadTorchFile(FileSystem& files,
                                        const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        files.OpenForReading(path, Caching::kCached));
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, file->Size());
  const absl::StatusOr<Value> value = ReadArchive(
      [&file](int64_t offset, absl::Span<char> out) {
        return file->PRead(offset, out);
      },
      0, bytes);
  FSDP_RETURN_IF_ERROR(InFile(path, value.status()));
  TorchFile result;
  FSDP_RETURN_IF_ERROR(InFile(
      path,
      result.catalog.AddFile(std::string(LastPart(path)), bytes).status()));
  FSDP_RETURN_IF_ERROR(InFile(path, Walker(result).Walk("", *value)));
  return result;
}

}  // namespace fsdp::checkpoint::tool
