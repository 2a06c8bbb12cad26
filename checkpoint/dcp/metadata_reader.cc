#include "checkpoint/dcp/metadata_reader.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "checkpoint/dcp/names.h"
#include "checkpoint/files/file_names.h"
#include "checkpoint/pickle/allow_list.h"
#include "checkpoint/pickle/document.h"
#include "checkpoint/pickle/unpickler.h"
#include "checkpoint/tensor/boxes.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/torch_dtype.h"

namespace fsdp::checkpoint {
namespace {

absl::Status Bad(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(".metadata: ", why));
}

absl::Status BadEntry(absl::string_view name, absl::string_view why) {
  return Bad(absl::StrCat("\"", absl::CHexEscape(name), "\": ", why));
}

const AllowList& Allowed() {
  static const auto* const allowed = [] {
    std::vector<std::string> names = {
        dcp_names::kMetadata,
        dcp_names::kTensor,
        dcp_names::kBytes,
        dcp_names::kChunk,
        dcp_names::kIndex,
        dcp_names::kProperties,
        dcp_names::kOldProperties,
        dcp_names::kMemoryFormat,
        dcp_names::kOldMemoryFormat,
        dcp_names::kStorageMeta,
        dcp_names::kStorageInfo,
        dcp_names::kLayout,
        dcp_names::kSize,
        dcp_names::kMegatronMetadata,
        dcp_names::kMegatronPlan,
        dcp_names::kPlan,
        dcp_names::kWriteItem,
        dcp_names::kWriteItemType,
        dcp_names::kTensorWriteData,
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "collections.OrderedDict",
    };
    AddTorchDtypeNames(names);
    return new AllowList(names);
  }();
  return *allowed;
}

// The parts of a checkpoint's name and its offset are what finds a chunk.
using ChunkKey = std::pair<absl::string_view, std::vector<int64_t>>;

// Objects of Python in a document, as this reader looks at them.
class Objects {
 public:
  explicit Objects(const Document& document) : document_(document) {}

  const Node& at(NodeId id) const { return document_[id]; }

  bool Is(const Node& node, absl::string_view global) const {
    return node.kind == NodeKind::kObject &&
           document_[node.global].text == global;
  }

  // Of the dict that is an object's state; None where it lacks the field.
  const Node& Field(const Node& object, absl::string_view name) const {
    static const Node* const none = new Node;
    const Node& state = document_[object.state];
    if (state.kind != NodeKind::kDict) return *none;
    for (size_t i = 0; i + 1 < state.items.size(); i += 2) {
      const Node& key = document_[state.items[i]];
      if (key.kind == NodeKind::kString && key.text == name) {
        return document_[state.items[i + 1]];
      }
    }
    return *none;
  }

  // Of torch.Size((2, 3)).
  absl::StatusOr<std::vector<int64_t>> Sizes(const Node& node) const {
    const Node* tuple = &node;
    if (Is(node, dcp_names::kSize) && document_[node.args].items.size() == 1) {
      tuple = &document_[document_[node.args].items[0]];
    }
    if (tuple->kind != NodeKind::kTuple && tuple->kind != NodeKind::kList) {
      return Bad("a torch.Size is none");
    }
    std::vector<int64_t> sizes;
    for (const NodeId item : tuple->items) {
      const Node& size = document_[item];
      if (size.kind != NodeKind::kInt || size.integer < 0) {
        return Bad("a torch.Size has what is no size");
      }
      sizes.push_back(size.integer);
    }
    return sizes;
  }

 private:
  const Document& document_;
};

// storage_data: where chunks and values are.
class Places {
 public:
  explicit Places(const Objects& objects) : objects_(objects) {}

  // MetadataIndex -> _StorageInfo.
  absl::Status Read(const Node& node) {
    if (node.kind != NodeKind::kDict) return Bad("has no storage_data");
    for (size_t i = 0; i + 1 < node.items.size(); i += 2) {
      const Node& index = objects_.at(node.items[i]);
      const Node& info = objects_.at(node.items[i + 1]);
      const Node& fqn = objects_.Field(index, "fqn");
      if (!objects_.Is(index, dcp_names::kIndex) ||
          fqn.kind != NodeKind::kString ||
          !objects_.Is(info, dcp_names::kStorageInfo)) {
        return Bad("storage_data has what is no place of a chunk");
      }
      ChunkKey key;
      key.first = fqn.text;
      const Node& offset = objects_.Field(index, "offset");
      if (offset.kind != NodeKind::kNone) {
        FSDP_ASSIGN_OR_RETURN(key.second, objects_.Sizes(offset));
      }
      absl::StatusOr<DcpPlace> place = Place(info);
      if (!place.ok()) return BadEntry(fqn.text, place.status().message());
      // A value and a scalar's only chunk have keys alike; names are unique.
      if (!places_.emplace(std::move(key), *place).second) {
        return BadEntry(fqn.text, "has two places");
      }
    }
    return absl::OkStatus();
  }

  // Null where it is in no file.
  const DcpPlace* Find(absl::string_view name,
                       const std::vector<int64_t>& offsets) const {
    const auto place = places_.find(ChunkKey{name, offsets});
    return place == places_.end() ? nullptr : &place->second;
  }

  std::vector<std::string> TakeFiles() { return std::move(names_); }

 private:
  absl::StatusOr<DcpPlace> Place(const Node& info) {
    const Node& path = objects_.Field(info, "relative_path");
    const Node& offset = objects_.Field(info, "offset");
    const Node& length = objects_.Field(info, "length");
    int64_t end = 0;
    if (path.kind != NodeKind::kString || offset.kind != NodeKind::kInt ||
        length.kind != NodeKind::kInt || offset.integer < 0 ||
        length.integer < 0 ||
        __builtin_add_overflow(offset.integer, length.integer, &end)) {
      return absl::InvalidArgumentError("its place in a file is none");
    }
    const Node& transforms = objects_.Field(info, "transform_descriptors");
    if (transforms.kind != NodeKind::kNone && !transforms.items.empty()) {
      return absl::InvalidArgumentError(
          "is compressed or otherwise transformed: save it without extensions");
    }
    FSDP_ASSIGN_OR_RETURN(const int file, File(path.text));
    return DcpPlace{file, offset.integer, length.integer};
  }

  absl::StatusOr<int> File(absl::string_view path) {
    const auto known = files_.find(path);
    if (known != files_.end()) return known->second;
    if (!CheckRelativePath(path).ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("its file \"", absl::CHexEscape(path),
                       "\" is not inside of the checkpoint: refused"));
    }
    const auto file = static_cast<int>(names_.size());
    names_.emplace_back(path);
    files_.emplace(path, file);
    return file;
  }

  const Objects& objects_;
  absl::flat_hash_map<ChunkKey, DcpPlace> places_;
  absl::flat_hash_map<absl::string_view, int> files_;
  std::vector<std::string> names_;  // of files
};

class Reader {
 public:
  explicit Reader(const Document& document)
      : document_(document), objects_(document), places_(objects_) {}

  absl::StatusOr<DcpMetadata> Read() {
    const Node& root = document_.root();
    // Which has a field more, of tensors that are laid out otherwise.
    if (!objects_.Is(root, dcp_names::kMetadata) &&
        !objects_.Is(root, dcp_names::kMegatronMetadata)) {
      return Bad("is no Metadata of DCP");
    }
    FSDP_RETURN_IF_ERROR(places_.Read(objects_.Field(root, "storage_data")));
    metadata_.files = places_.TakeFiles();
    FSDP_RETURN_IF_ERROR(
        ReadEntries(objects_.Field(root, "state_dict_metadata")));
    FSDP_RETURN_IF_ERROR(ReadPaths(objects_.Field(root, "planner_data")));
    const Node& version = objects_.Field(root, "version");
    if (version.kind == NodeKind::kString) {
      metadata_.version = std::string(version.text);
    }
    return std::move(metadata_);
  }

 private:
  absl::Status ReadEntries(const Node& node) {
    if (node.kind != NodeKind::kDict) return Bad("has no state_dict_metadata");
    absl::flat_hash_map<absl::string_view, bool> names;
    for (size_t i = 0; i + 1 < node.items.size(); i += 2) {
      const Node& name = document_[node.items[i]];
      const Node& entry = document_[node.items[i + 1]];
      if (name.kind != NodeKind::kString) return Bad("a name is no text");
      if (!names.emplace(name.text, true).second) {
        return BadEntry(name.text, "is there twice");
      }
      if (objects_.Is(entry, dcp_names::kTensor)) {
        FSDP_RETURN_IF_ERROR(ReadTensor(name.text, entry));
      } else if (objects_.Is(entry, dcp_names::kBytes)) {
        const DcpPlace* const place = places_.Find(name.text, {});
        if (place == nullptr) return BadEntry(name.text, "is in no file");
        metadata_.values.emplace_back(name.text, *place);
      } else {
        return BadEntry(name.text, "is neither a tensor nor bytes");
      }
    }
    return absl::OkStatus();
  }

  absl::Status ReadTensor(absl::string_view name, const Node& entry) {
    DcpTensor tensor;
    tensor.info.name = std::string(name);
    const Node& properties = objects_.Field(entry, "properties");
    const Node& state = document_[properties.state];
    const bool is_known = objects_.Is(properties, dcp_names::kProperties) ||
                          objects_.Is(properties, dcp_names::kOldProperties);
    const Node* const dtype_node =
        is_known && state.kind == NodeKind::kTuple && !state.items.empty()
            ? &document_[state.items[0]]
            : nullptr;
    const TorchDtype* const dtype =
        dtype_node != nullptr && dtype_node->kind == NodeKind::kGlobal
            ? TorchDtypeNamed(dtype_node->text)
            : nullptr;
    if (dtype == nullptr) return BadEntry(name, "its dtype is none");
    tensor.info.dtype = dtype->dtype;
    FSDP_ASSIGN_OR_RETURN(tensor.info.shape,
                          objects_.Sizes(objects_.Field(entry, "size")));
    FSDP_RETURN_IF_ERROR(BytesOf(tensor.info).status());
    std::vector<Box> boxes;
    for (const NodeId item : objects_.Field(entry, "chunks").items) {
      const Node& chunk = document_[item];
      Box box;
      FSDP_ASSIGN_OR_RETURN(box.offsets,
                            objects_.Sizes(objects_.Field(chunk, "offsets")));
      FSDP_ASSIGN_OR_RETURN(box.sizes,
                            objects_.Sizes(objects_.Field(chunk, "sizes")));
      const absl::Status bounds = CheckInBounds(tensor.info.shape, box);
      if (!bounds.ok()) return BadEntry(name, bounds.message());
      boxes.push_back(std::move(box));
    }
    const absl::Status tiles = CheckTiles(tensor.info.shape, boxes);
    if (!tiles.ok()) return BadEntry(name, tiles.message());
    for (Box& box : boxes) {
      if (box.Numel() == 0) continue;
      const DcpPlace* const place = places_.Find(name, box.offsets);
      if (place == nullptr) {
        return BadEntry(name, "a chunk of it is in no file");
      }
      tensor.chunks.push_back({std::move(box), *place});
    }
    metadata_.tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  // A planner of somebody's own may keep anything there.
  absl::Status ReadPaths(const Node& node) {
    if (node.kind != NodeKind::kDict) return absl::OkStatus();
    for (size_t i = 0; i + 1 < node.items.size(); i += 2) {
      const Node& name = document_[node.items[i]];
      if (name.kind != NodeKind::kString) continue;
      DcpPath path;
      for (const NodeId item : document_[node.items[i + 1]].items) {
        const Node& key = document_[item];
        if (key.kind == NodeKind::kString) {
          path.emplace_back(std::string(key.text));
        } else if (key.kind == NodeKind::kInt) {
          path.emplace_back(key.integer);
        }
      }
      metadata_.paths.emplace_back(std::string(name.text), std::move(path));
    }
    return absl::OkStatus();
  }

  const Document& document_;
  const Objects objects_;
  Places places_;
  DcpMetadata metadata_;
};

}  // namespace

absl::StatusOr<DcpMetadata> ReadDcpMetadata(std::string bytes) {
  absl::StatusOr<Document> document = Unpickle(std::move(bytes), Allowed());
  if (!document.ok()) return Bad(document.status().message());
  return Reader(*document).Read();
}

}  // namespace fsdp::checkpoint
