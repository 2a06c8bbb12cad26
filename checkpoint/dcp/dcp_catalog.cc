#include "checkpoint/dcp/dcp_catalog.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/chunk_reader.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_reader.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {
namespace {

// Of two million chunks.
constexpr int64_t kMaxMetadataBytes = int64_t{512} << 20;
constexpr char kModelItem[] = "model";

// Renames `tensors` and drops what is not of the model.
void KeepModel(DcpMetadata& metadata) {
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
  std::vector<DcpTensor> kept;
  for (DcpTensor& tensor : metadata.tensors) {
    const DcpPath* const path = path_of(tensor);
    if (has_item) {
      if (!is_in_item(tensor)) continue;
      tensor.info.name = DcpName(DcpPath(path->begin() + 1, path->end()));
    } else if (path != nullptr && path->size() > 1) {
      continue;
    }
    kept.push_back(std::move(tensor));
  }
  metadata.tensors = std::move(kept);
}

void KeepPrefixed(absl::string_view prefix, std::vector<DcpTensor>& tensors) {
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(),
                               [prefix](const DcpTensor& tensor) {
                                 return !absl::StartsWith(tensor.info.name,
                                                          prefix);
                               }),
                tensors.end());
  for (DcpTensor& tensor : tensors) tensor.info.name.erase(0, prefix.size());
}

// Finds the bytes of chunks, file by file.
class ChunkFinder {
 public:
  ChunkFinder(FileSystem& files, const std::string& folder,
              const DcpMetadata& metadata)
      : files_(files), folder_(folder), metadata_(metadata) {}

  absl::StatusOr<Catalog> Find() && {
    struct Place {
      size_t tensor;
      size_t chunk;
      const DcpPlace* place;
    };
    std::vector<Place> places;
    std::vector<StoredTensor> tensors;
    for (size_t i = 0; i < metadata_.tensors.size(); ++i) {
      const DcpTensor& tensor = metadata_.tensors[i];
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
      const DcpTensor& tensor = metadata_.tensors[place.tensor];
      FSDP_ASSIGN_OR_RETURN(tensors[place.tensor].boxes[place.chunk],
                            FindBox(tensor, tensor.chunks[place.chunk]));
    }
    for (StoredTensor& tensor : tensors) {
      FSDP_RETURN_IF_ERROR(
          InFile(kDcpMetadataFile, catalog_.AddTensor(std::move(tensor))));
    }
    return std::move(catalog_);
  }

 private:
  absl::Status InFile(const std::string& name,
                      const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat(JoinPath(folder_, name),
                                                    ": ", status.message()));
  }

  // Makes the file of that number the one that is read.
  absl::Status Open(int file) {
    if (file == open_number_) return absl::OkStatus();
    const std::string& name = metadata_.files[static_cast<size_t>(file)];
    const std::string path = JoinPath(folder_, name);
    FSDP_ASSIGN_OR_RETURN(open_, files_.OpenForReading(path, Caching::kCached));
    FSDP_ASSIGN_OR_RETURN(open_bytes_, open_->Size());
    absl::StatusOr<int> number = catalog_.AddFile(name, open_bytes_);
    FSDP_RETURN_IF_ERROR(InFile(kDcpMetadataFile, number.status()));
    catalog_number_ = *number;
    open_number_ = file;
    return absl::OkStatus();
  }

  absl::StatusOr<StoredBox> FindBox(const DcpTensor& tensor,
                                    const DcpChunk& chunk) {
    FSDP_RETURN_IF_ERROR(Open(chunk.place.file));
    const std::string& name =
        metadata_.files[static_cast<size_t>(chunk.place.file)];
    // What is read is bounded by what is there.
    if (chunk.place.length > open_bytes_ ||
        chunk.place.offset > open_bytes_ - chunk.place.length) {
      return InFile(name, absl::InvalidArgumentError(absl::StrCat(
                              "has ", open_bytes_, " bytes, but tensor \"",
                              tensor.info.name, "\" is in ", chunk.place.length,
                              " from byte ", chunk.place.offset,
                              " on: the file is cut off; copy it again")));
    }
    StoredBox box;
    static_cast<Box&>(box) = chunk.box;
    box.file = catalog_number_;
    const absl::StatusOr<int64_t> at = FindChunkBytes(
        tensor, chunk, [this](int64_t offset, absl::Span<char> bytes) {
          return open_->PRead(offset, bytes);
        });
    FSDP_RETURN_IF_ERROR(InFile(name, at.status()));
    box.offset = *at;
    return box;
  }

  FileSystem& files_;
  const std::string& folder_;
  const DcpMetadata& metadata_;
  Catalog catalog_;
  std::unique_ptr<File> open_;
  int open_number_ = -1;  // in metadata_.files
  int catalog_number_ = -1;
  int64_t open_bytes_ = 0;
};

}  // namespace

absl::StatusOr<Catalog> ReadDcpCatalog(FileSystem& files,
                                       const std::string& folder,
                                       const DcpCatalogOptions& options) {
  const std::string path = JoinPath(folder, kDcpMetadataFile);
  FSDP_ASSIGN_OR_RETURN(std::string bytes,
                        ReadFile(files, path, kMaxMetadataBytes));
  absl::StatusOr<DcpMetadata> metadata = ReadDcpMetadata(std::move(bytes));
  if (!metadata.ok()) {
    return absl::Status(
        metadata.status().code(),
        absl::StrCat(folder, ": ", metadata.status().message()));
  }
  if (options.model_only) KeepModel(*metadata);
  KeepPrefixed(options.prefix, metadata->tensors);
  return ChunkFinder(files, folder, *metadata).Find();
}

}  // namespace fsdp::checkpoint
