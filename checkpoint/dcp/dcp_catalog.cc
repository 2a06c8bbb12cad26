#include "checkpoint/dcp/dcp_catalog.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/chunk_reader.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_reader.h"
#include "checkpoint/dcp/place_reader.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {
namespace {

// Of two million chunks.
constexpr int64_t kMaxMetadataBytes = int64_t{512} << 20;
constexpr char kModelItem[] = "model";

void KeepPrefixed(absl::string_view prefix, std::vector<DcpTensor>& tensors) {
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(),
                               [prefix](const DcpTensor& tensor) {
                                 return !absl::StartsWith(tensor.info.name,
                                                          prefix);
                               }),
                tensors.end());
  for (DcpTensor& tensor : tensors) tensor.info.name.erase(0, prefix.size());
}

// Whether it is that of an item with a model or an optimizer.
bool IsItem(const DcpPath::value_type& key) {
  const auto* const name = std::get_if<std::string>(&key);
  return name != nullptr && (*name == kModelItem ||
                             std::find(std::begin(kDcpOptimizerItems),
                                       std::end(kDcpOptimizerItems),
                                       *name) != std::end(kDcpOptimizerItems));
}

// What is in an item of its own, {"app": {"model": ..., "optim": ...}}, is as
// if it were at the top, unless that may have a model or an optimizer itself.
void Unwrap(DcpMetadata& metadata) {
  absl::flat_hash_set<absl::string_view> tensors;
  for (const DcpTensor& tensor : metadata.tensors) {
    tensors.insert(tensor.info.name);
  }
  const DcpPath::value_type model(kModelItem);
  std::set<DcpPath::value_type> wrappers;
  for (const auto& [name, path] : metadata.paths) {
    if (!path.empty() && IsItem(path.front())) return;
    if (!tensors.contains(name)) continue;
    if (path.size() < 2) return;
    if (path.size() > 2 && path[1] == model) wrappers.insert(path.front());
  }
  if (wrappers.size() != 1) return;
  for (auto& [name, path] : metadata.paths) {
    if (path.size() > 1 && path.front() == *wrappers.begin()) {
      path.erase(path.begin());
    }
  }
}

// Finds the bytes of chunks, file by file.
class ChunkFinder {
 public:
  ChunkFinder(FileSystem& files, const std::string& folder,
              const std::vector<std::string>& names,
              absl::Span<const DcpTensor> tensors)
      : folder_(folder), places_(files, folder, names), tensors_(tensors) {}

  absl::StatusOr<Catalog> Find() && {
    struct Place {
      size_t tensor;
      size_t chunk;
      const DcpPlace* place;
    };
    std::vector<Place> places;
    std::vector<StoredTensor> tensors;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const DcpTensor& tensor = tensors_[i];
      tensors.push_back({tensor.info, {}});
      tensors.back().boxes.resize(tensor.chunks.size());
      for (size_t j = 0; j < tensor.chunks.size(); ++j) {
        places.push_back({i, j, &tensor.chunks[j].place});
      }
    }
    std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
      return std::tie(a.place->file, a.place->offset) <
             std::tie(b.place->file, b.place->offset);
    });
    for (const Place& place : places) {
      const DcpTensor& tensor = tensors_[place.tensor];
      FSDP_ASSIGN_OR_RETURN(tensors[place.tensor].boxes[place.chunk],
                            FindBox(tensor, tensor.chunks[place.chunk]));
    }
    for (StoredTensor& tensor : tensors) {
      FSDP_RETURN_IF_ERROR(InMetadata(catalog_.AddTensor(std::move(tensor))));
    }
    return std::move(catalog_);
  }

 private:
  absl::Status InMetadata(const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::Status(status.code(),
                        absl::StrCat(JoinPath(folder_, kDcpMetadataFile), ": ",
                                     status.message()));
  }

  absl::Status Open(const DcpTensor& tensor, const DcpPlace& place) {
    FSDP_RETURN_IF_ERROR(
        places_.Open(place, absl::StrCat("tensor \"", tensor.info.name, "\"")));
    if (place.file == file_) return absl::OkStatus();
    absl::StatusOr<int> number =
        catalog_.AddFile(places_.name(), places_.bytes());
    FSDP_RETURN_IF_ERROR(InMetadata(number.status()));
    catalog_number_ = *number;
    file_ = place.file;
    return absl::OkStatus();
  }

  absl::StatusOr<StoredBox> FindBox(const DcpTensor& tensor,
                                    const DcpChunk& chunk) {
    FSDP_RETURN_IF_ERROR(Open(tensor, chunk.place));
    StoredBox box;
    static_cast<Box&>(box) = chunk.box;
    box.file = catalog_number_;
    const absl::StatusOr<int64_t> at =
        FindChunkBytes(tensor, chunk, places_.read());
    FSDP_RETURN_IF_ERROR(places_.InFile(at.status()));
    box.offset = *at;
    return box;
  }

  const std::string& folder_;
  PlaceReader places_;
  const absl::Span<const DcpTensor> tensors_;
  Catalog catalog_;
  int file_ = -1;            // of DcpMetadata::files
  int catalog_number_ = -1;  // its number in catalog_
};

}  // namespace

absl::StatusOr<DcpMetadata> ReadDcpFolder(FileSystem& files,
                                          const std::string& folder) {
  const std::string path = JoinPath(folder, kDcpMetadataFile);
  FSDP_ASSIGN_OR_RETURN(std::string bytes,
                        ReadFile(files, path, kMaxMetadataBytes));
  absl::StatusOr<DcpMetadata> metadata = ReadDcpMetadata(std::move(bytes));
  if (!metadata.ok()) {
    return absl::Status(
        metadata.status().code(),
        absl::StrCat(folder, ": ", metadata.status().message()));
  }
  Unwrap(*metadata);
  return metadata;
}

std::vector<DcpTensor> TakeModel(DcpMetadata& metadata) {
  absl::flat_hash_map<absl::string_view, const DcpPath*> paths;
  for (const auto& [name, path] : metadata.paths) paths[name] = &path;
  const auto path_of = [&paths](const DcpTensor& tensor) -> const DcpPath* {
    const auto found = paths.find(tensor.info.name);
    return found == paths.end() ? nullptr : found->second;
  };
  const auto is_in_item = [&path_of](const DcpTensor& tensor) {
    const DcpPath* const path = path_of(tensor);
    return path != nullptr && path->size() > 1 &&
           path->front() == DcpPath::value_type(kModelItem);
  };
  const bool has_item =
      std::any_of(metadata.tensors.begin(), metadata.tensors.end(), is_in_item);
  std::vector<DcpTensor> model;
  std::vector<DcpTensor> rest;
  for (DcpTensor& tensor : metadata.tensors) {
    const DcpPath* const path = path_of(tensor);
    const bool is_other = (path != nullptr && path->size() > 1) ||
                          IsMegatronOptimizer(metadata, tensor.info.name);
    if (has_item ? !is_in_item(tensor) : is_other) {
      rest.push_back(std::move(tensor));
      continue;
    }
    if (has_item) {
      tensor.info.name = DcpName(DcpPath(path->begin() + 1, path->end()));
    }
    model.push_back(std::move(tensor));
  }
  metadata.tensors = std::move(rest);
  return model;
}

bool IsMegatronOptimizer(const DcpMetadata& metadata, absl::string_view name) {
  if (!metadata.paths.empty()) return false;
  if (absl::ConsumePrefix(&name, "chained_")) {
    name.remove_prefix(
        std::min(name.find_first_not_of("0123456789"), name.size()));
    if (!absl::ConsumePrefix(&name, ".")) return false;
  }
  return absl::StartsWith(name, "optimizer.");
}

absl::StatusOr<Catalog> FindDcpTensors(FileSystem& files,
                                       const std::string& folder,
                                       const std::vector<std::string>& names,
                                       absl::Span<const DcpTensor> tensors) {
  return ChunkFinder(files, folder, names, tensors).Find();
}

absl::StatusOr<Catalog> ReadDcpCatalog(FileSystem& files,
                                       const std::string& folder,
                                       const DcpCatalogOptions& options) {
  FSDP_ASSIGN_OR_RETURN(DcpMetadata metadata, ReadDcpFolder(files, folder));
  std::vector<DcpTensor> tensors =
      options.model_only ? TakeModel(metadata) : std::move(metadata.tensors);
  KeepPrefixed(options.prefix, tensors);
  return FindDcpTensors(files, folder, metadata.files, tensors);
}

}  // namespace fsdp::checkpoint
