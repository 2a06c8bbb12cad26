#include "checkpoint/torch_archive/archive_reader.h"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "checkpoint/pickle/allow_list.h"
#include "checkpoint/pickle/document.h"
#include "checkpoint/pickle/unpickler.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/torch_dtype.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kOrderedDict[] = "collections.OrderedDict";
constexpr char kSize[] = "torch.Size";
constexpr char kTensor2[] = "torch._utils._rebuild_tensor_v2";
constexpr char kTensor3[] = "torch._utils._rebuild_tensor_v3";
constexpr char kParameter[] = "torch._utils._rebuild_parameter";
constexpr char kUntyped[] = "torch.storage.UntypedStorage";

constexpr int64_t kMaxPickleBytes = int64_t{1} << 30;
constexpr int64_t kMaxMarkBytes = 64;  // of "version" and the like

absl::Status Bad(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("torch.save file: ", why));
}

const AllowList& Allowed() {
  static const auto* const allowed = [] {
    std::vector<std::string> names = {kOrderedDict, kSize,      kTensor2,
                                      kTensor3,     kParameter, kUntyped};
    AddTorchDtypeNames(names);
    AddTorchStorageNames(names);
    return new AllowList(names);
  }();
  return *allowed;
}

// What data.pkl says of tensors and of the storages that they lie in.
class Tensors {
 public:
  Tensors(const Document& document, ZipReader& zip, std::string folder)
      : document_(document), zip_(zip), folder_(std::move(folder)) {}

  // (storage, offset, shape, strides, requires_grad, hooks, ...); without
  // `dtype` the storage has it.
  absl::StatusOr<ArchiveTensor> Build(const std::vector<NodeId>& args,
                                      const TorchDtype* dtype) {
    ArchiveTensor tensor;
    int64_t elements = 0;
    FSDP_RETURN_IF_ERROR(Storage(document_[args[0]], dtype, tensor, elements));
    const Node& offset = document_[args[1]];
    if (offset.kind != NodeKind::kInt || offset.integer < 0) {
      return Bad("a tensor whose offset is none");
    }
    tensor.storage_offset = offset.integer;
    FSDP_ASSIGN_OR_RETURN(tensor.shape, Numbers(document_[args[2]]));
    FSDP_ASSIGN_OR_RETURN(tensor.strides, Numbers(document_[args[3]]));
    FSDP_RETURN_IF_ERROR(CheckExtent(tensor, elements));
    return tensor;
  }

 private:
  absl::StatusOr<std::vector<int64_t>> Numbers(const Node& node) const {
    const Node* tuple = &node;
    if (node.kind == NodeKind::kObject &&
        document_[node.global].text == kSize &&
        document_[node.args].items.size() == 1) {
      tuple = &document_[document_[node.args].items[0]];
    }
    std::vector<int64_t> numbers;
    for (const NodeId item : tuple->items) {
      const Node& number = document_[item];
      if (number.kind != NodeKind::kInt || number.integer < 0) {
        return Bad("a tensor whose shape or strides are none");
      }
      numbers.push_back(number.integer);
    }
    return numbers;
  }

  absl::Status CheckExtent(const ArchiveTensor& tensor, int64_t elements) {
    if (tensor.shape.size() != tensor.strides.size()) {
      return Bad("a tensor with more sizes than strides, or fewer");
    }
    const TensorInfo info = {tensor.storage, tensor.dtype, tensor.shape};
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(info));
    if (numel == 0) return absl::OkStatus();
    int64_t last = tensor.storage_offset;
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      int64_t reach = 0;
      if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i],
                                 &reach) ||
          __builtin_add_overflow(last, reach, &last)) {
        return Bad("a tensor with strides of more than 64 bits");
      }
    }
    if (last >= elements) {
      return Bad(absl::StrCat("tensor ", ToString(info), " reaches element ",
                              last, " of storage \"", tensor.storage,
                              "\", which has ", elements));
    }
    return absl::OkStatus();
  }

  // ("storage", class, key, device, count) of a persistent id. Says the dtype,
  // where the storage's bytes are, and how many elements they are.
  absl::Status Storage(const Node& node, const TorchDtype* dtype,
                       ArchiveTensor& tensor, int64_t& elements) {
    if (node.kind != NodeKind::kPersistent)
      return Bad("a storage that is none");
    const std::vector<NodeId>& id = document_[node.args].items;
    if (id.size() != 5 || document_[id[0]].text != "storage" ||
        document_[id[1]].kind != NodeKind::kGlobal ||
        document_[id[2]].kind != NodeKind::kString ||
        document_[id[4]].kind != NodeKind::kInt) {
      return Bad("a storage that is none");
    }
    const absl::string_view type = document_[id[1]].text;
    const bool is_untyped = type == kUntyped;
    const TorchDtype* const typed = TorchStorageNamed(type);
    if (dtype == nullptr) dtype = typed;
    if (dtype == nullptr || (!is_untyped && dtype != typed)) {
      return Bad(absl::StrCat("a tensor in a storage of ", type));
    }
    tensor.dtype = dtype->dtype;
    const int64_t item = ItemBytes(tensor.dtype);
    FSDP_RETURN_IF_ERROR(Place(document_[id[2]].text, tensor));
    elements = tensor.storage_bytes / item;
    const int64_t count = document_[id[4]].integer;
    // Equal to the count by the bytes, which overflow nothing.
    const int64_t unit = is_untyped ? 1 : item;
    if (count != tensor.storage_bytes / unit ||
        tensor.storage_bytes % unit != 0) {
      return Bad(absl::StrCat("storage \"", tensor.storage, "\" has ",
                              tensor.storage_bytes, " bytes, which are not ",
                              count, " of ", unit, " each"));
    }
    return absl::OkStatus();
  }

  absl::Status Place(absl::string_view key, ArchiveTensor& tensor) {
    tensor.storage = std::string(key);
    const ZipEntry* const entry =
        zip_.Find(absl::StrCat(folder_, "/data/", key));
    if (entry == nullptr) {
      return Bad(
          absl::StrCat("storage \"", absl::CHexEscape(key), "\" is not in it"));
    }
    tensor.storage_bytes = entry->bytes;
    // Many tensors may lie in one storage.
    const auto [known, is_new] = places_.emplace(tensor.storage, 0);
    if (is_new) {
      FSDP_ASSIGN_OR_RETURN(known->second, zip_.PayloadOffset(*entry));
    }
    tensor.file_offset = known->second;
    return absl::OkStatus();
  }

  const Document& document_;
  ZipReader& zip_;
  const std::string folder_;
  absl::flat_hash_map<std::string, int64_t> places_;  // by storage
};

// From the tree of data.pkl to values.
class Builder {
 public:
  Builder(const Document& document, ZipReader& zip, std::string folder)
      : document_(document), tensors_(document, zip, std::move(folder)) {}

  // Recurses no deeper than documents do.
  absl::StatusOr<Value> Build(const Node& node) {
    switch (node.kind) {
      case NodeKind::kNone:
        return Value{};
      case NodeKind::kBool:
        return Value{node.integer != 0};
      case NodeKind::kInt:
        return Value{node.integer};
      case NodeKind::kDouble:
        return Value{node.real};
      case NodeKind::kString:
        return Value{std::string(node.text)};
      case NodeKind::kTuple: {
        FSDP_ASSIGN_OR_RETURN(std::vector<Value> items, Items(node));
        return Value{Value::Tuple{std::move(items)}};
      }
      case NodeKind::kList: {
        FSDP_ASSIGN_OR_RETURN(std::vector<Value> items, Items(node));
        return Value{Value::List{std::move(items)}};
      }
      case NodeKind::kDict:
        return Dict(node);
      case NodeKind::kObject:
        return Object(node);
      case NodeKind::kBytes:
      case NodeKind::kGlobal:
      case NodeKind::kPersistent:
        break;
    }
    return Bad(
        absl::StrCat(node.kind == NodeKind::kBytes ? absl::string_view("bytes")
                     : node.kind == NodeKind::kGlobal
                         ? node.text
                         : absl::string_view("a storage without a tensor"),
                     " is no tensor, number, text, list or dict"));
  }

 private:
  absl::StatusOr<std::vector<Value>> Items(const Node& node) {
    std::vector<Value> items;
    items.reserve(node.items.size());
    for (const NodeId item : node.items) {
      FSDP_ASSIGN_OR_RETURN(Value value, Build(document_[item]));
      items.push_back(std::move(value));
    }
    return items;
  }

  absl::StatusOr<Value> Dict(const Node& node) {
    Value::Dict dict;
    dict.items.reserve(node.items.size() / 2);
    for (size_t i = 0; i + 1 < node.items.size(); i += 2) {
      FSDP_ASSIGN_OR_RETURN(Value key, Build(document_[node.items[i]]));
      FSDP_ASSIGN_OR_RETURN(Value value, Build(document_[node.items[i + 1]]));
      dict.items.emplace_back(std::move(key), std::move(value));
    }
    return Value{std::move(dict)};
  }

  absl::StatusOr<Value> Object(const Node& node) {
    const absl::string_view name = document_[node.global].text;
    const std::vector<NodeId>& args = document_[node.args].items;
    if (name == kOrderedDict && args.empty()) return Dict(node);
    if (name == kSize && args.size() == 1) return Build(document_[args[0]]);
    if (name == kParameter && args.size() == 3) {
      return Build(document_[args[0]]);
    }
    if (name == kTensor2 && (args.size() == 6 || args.size() == 7)) {
      return Tensor(args, nullptr);
    }
    if (name == kTensor3 && (args.size() == 7 || args.size() == 8)) {
      const Node& dtype = document_[args[6]];
      const TorchDtype* const known = dtype.kind == NodeKind::kGlobal
                                          ? TorchDtypeNamed(dtype.text)
                                          : nullptr;
      if (known == nullptr) return Bad("a tensor whose dtype is none");
      return Tensor(args, known);
    }
    return Bad(absl::StrCat(name, " with ", args.size(),
                            " arguments is not what torch.save() writes"));
  }

  absl::StatusOr<Value> Tensor(const std::vector<NodeId>& args,
                               const TorchDtype* dtype) {
    FSDP_ASSIGN_OR_RETURN(ArchiveTensor tensor, tensors_.Build(args, dtype));
    return Value{std::move(tensor)};
  }

  const Document& document_;
  Tensors tensors_;
};

// What all names of entries begin with.
absl::StatusOr<std::string> Folder(const ZipReader& zip) {
  std::string folder;
  for (const ZipEntry& entry : zip.entries()) {
    const size_t slash = entry.name.find('/');
    const std::string own = entry.name.substr(
        0, slash == std::string::npos ? entry.name.size() : slash);
    if (folder.empty()) folder = own;
    if (slash == std::string::npos || own != folder || own.empty()) {
      return Bad(absl::StrCat("entry \"", absl::CHexEscape(entry.name),
                              "\" is not in the folder of the others"));
    }
  }
  return folder;
}

absl::Status CheckMarks(ZipReader& zip, const std::string& folder) {
  constexpr int kNewestVersion = 10;
  const ZipEntry* const version = zip.Find(absl::StrCat(folder, "/version"));
  if (version == nullptr) return Bad("has no version: not by torch.save()?");
  FSDP_ASSIGN_OR_RETURN(const std::string number,
                        zip.Read(*version, kMaxMarkBytes));
  int value = 0;
  if (!absl::SimpleAtoi(number, &value) || value < 1 ||
      value > kNewestVersion) {
    return Bad(absl::StrCat("version \"", absl::CHexEscape(number), "\"; 1 to ",
                            kNewestVersion, " are read"));
  }
  const ZipEntry* const order = zip.Find(absl::StrCat(folder, "/byteorder"));
  if (order == nullptr) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const std::string text,
                        zip.Read(*order, kMaxMarkBytes));
  if (absl::StripAsciiWhitespace(text) == "little") return absl::OkStatus();
  return Bad(absl::StrCat("byte order \"", absl::CHexEscape(text),
                          "\"; only \"little\" is read"));
}

}  // namespace

absl::StatusOr<Value> ReadArchive(const ReadAt& read, int64_t offset,
                                  int64_t length) {
  FSDP_ASSIGN_OR_RETURN(ZipReader zip, ZipReader::Open(read, offset, length));
  FSDP_ASSIGN_OR_RETURN(const std::string folder, Folder(zip));
  FSDP_RETURN_IF_ERROR(CheckMarks(zip, folder));
  const ZipEntry* const pickle = zip.Find(absl::StrCat(folder, "/data.pkl"));
  if (pickle == nullptr) return Bad("has no data.pkl: not by torch.save()?");
  FSDP_ASSIGN_OR_RETURN(std::string bytes, zip.Read(*pickle, kMaxPickleBytes));
  FSDP_ASSIGN_OR_RETURN(const Document document,
                        Unpickle(std::move(bytes), Allowed()));
  return Builder(document, zip, folder).Build(document.root());
}

}  // namespace fsdp::checkpoint
