#include "checkpoint/load/source_folder.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/safetensors_catalog.h"
#include "checkpoint/catalog/shard_files.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/huggingface/file_index.h"
#include "checkpoint/safetensors/safetensors_header.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kEnding[] = ".safetensors";
constexpr char kIndexEnding[] = ".safetensors.index.json";
// Of an index: ten times that of the largest models there are.
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;

// "optimizer/exp_avg" has its index, and that its files, in "optimizer/".
std::string FolderIn(const std::string& name) {
  const size_t slash = name.rfind('/');
  return slash == std::string::npos ? "" : name.substr(0, slash + 1);
}

}  // namespace

absl::Status SourceFolder::InFile(const std::string& name,
                                  const absl::Status& status) const {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(JoinPath(root_, name), ": ",
                                                  status.message()));
}

absl::StatusOr<SourceFile> SourceFolder::SourceOf(
    const std::string& name) const {
  SourceFile source{JoinPath(root_, name)};
  if (sums_ == nullptr) return source;
  const auto found = sums_->find(name);
  if (found == sums_->end()) {
    return InFile(name, absl::NotFoundError(
                            "the manifest of the checkpoint does not name it"));
  }
  source.sums = &found->second;
  return source;
}

absl::StatusOr<int64_t> SourceFolder::SizeOf(const std::string& name) const {
  FSDP_ASSIGN_OR_RETURN(const SourceFile source, SourceOf(name));
  if (source.sums != nullptr) return source.sums->bytes;
  FSDP_ASSIGN_OR_RETURN(const FileInfo info, files_.Stat(source.path));
  if (info.kind != FileInfo::Kind::kOther) return info.bytes;
  // A link, such as those of a cache that Hugging Face's hub has filled.
  FSDP_ASSIGN_OR_RETURN(const auto file,
                        files_.OpenForReading(source.path, Caching::kCached));
  return file->Size();
}

absl::StatusOr<std::string> SourceFolder::ReadBytes(const std::string& name,
                                                    int64_t offset,
                                                    int64_t bytes) const {
  FSDP_ASSIGN_OR_RETURN(SourceFile source, SourceOf(name));
  RangeReaderOptions options;
  options.chunk_bytes = kBlockBytes;
  options.chunks = 2;
  options.caching = Caching::kCached;
  FSDP_ASSIGN_OR_RETURN(const auto reader,
                        RangeReader::Create(files_, {source}, options));
  std::string result;
  result.reserve(bytes);
  FSDP_RETURN_IF_ERROR(
      reader->Read({{0, offset, bytes}},
                   [&result](size_t, int64_t, absl::Span<const char> part) {
                     result.append(part.data(), part.size());
                     return absl::OkStatus();
                   }));
  return result;
}

absl::StatusOr<std::string> SourceFolder::ReadText(const std::string& name,
                                                   int64_t max_bytes) const {
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, SizeOf(name));
  if (bytes > max_bytes) {
    return InFile(name, absl::InvalidArgumentError(absl::StrCat(
                            "has ", bytes, " bytes, where ", max_bytes,
                            " are the most that such a file can have")));
  }
  return ReadBytes(name, 0, bytes);
}

absl::StatusOr<SafetensorsFile> SourceFolder::ReadHeader(
    const std::string& name) const {
  FSDP_ASSIGN_OR_RETURN(const int64_t size, SizeOf(name));
  FSDP_ASSIGN_OR_RETURN(
      const std::string first,
      ReadBytes(name, 0, std::min(size, kSafetensorsLengthBytes)));
  const absl::StatusOr<int64_t> length = ParseSafetensorsLength(first, size);
  FSDP_RETURN_IF_ERROR(InFile(name, length.status()));
  FSDP_ASSIGN_OR_RETURN(const std::string json,
                        ReadBytes(name, kSafetensorsLengthBytes, *length));
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(json, size);
  FSDP_RETURN_IF_ERROR(InFile(name, header.status()));
  return SafetensorsFile{name, *std::move(header)};
}

absl::StatusOr<Catalog> SourceFolder::ReadIndexed(
    const std::string& index_name) const {
  FSDP_ASSIGN_OR_RETURN(const std::string text,
                        ReadText(index_name, kMaxIndexBytes));
  absl::StatusOr<FileIndex> index = ParseFileIndex(text);
  FSDP_RETURN_IF_ERROR(InFile(index_name, index.status()));
  std::vector<SafetensorsFile> headers;
  for (std::string& name : index->files) {
    name.insert(0, FolderIn(index_name));
    absl::StatusOr<SafetensorsFile> header = ReadHeader(name);
    if (absl::IsNotFound(header.status())) continue;  // listed with all others
    FSDP_RETURN_IF_ERROR(header.status());
    headers.push_back(*std::move(header));
  }
  absl::StatusOr<Catalog> catalog = CatalogOfHuggingFace(*index, headers);
  FSDP_RETURN_IF_ERROR(InFile(index_name, catalog.status()));
  return catalog;
}

absl::StatusOr<Catalog> SourceFolder::ReadAll(
    absl::Span<const std::string> names) const {
  std::vector<SafetensorsFile> headers;
  for (const std::string& name : names) {
    FSDP_ASSIGN_OR_RETURN(SafetensorsFile header, ReadHeader(name));
    headers.push_back(std::move(header));
  }
  absl::StatusOr<Catalog> catalog = CatalogOfSafetensors(headers);
  if (catalog.ok()) return catalog;
  return absl::Status(catalog.status().code(),
                      absl::StrCat(root_, ": ", catalog.status().message()));
}

absl::StatusOr<Catalog> SourceFolder::ReadStem(const std::string& stem) const {
  const std::string index = absl::StrCat(stem, kIndexEnding);
  bool is_indexed = sums_ != nullptr && sums_->count(index) > 0;
  if (sums_ == nullptr) {
    FSDP_ASSIGN_OR_RETURN(is_indexed, Exists(files_, JoinPath(root_, index)));
  }
  if (is_indexed) return ReadIndexed(index);
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> shards, ShardsOf(stem));
  if (!shards.empty()) return ReadAll(shards);
  return ReadAll({absl::StrCat(stem, kEnding)});
}

absl::StatusOr<std::vector<std::string>> SourceFolder::ShardsOf(
    const std::string& stem) const {
  std::vector<std::string> names;
  if (sums_ != nullptr) {
    for (const auto& [name, sums] : *sums_) names.push_back(name);
  } else {
    FSDP_ASSIGN_OR_RETURN(names, files_.List(FolderOf(JoinPath(root_, stem))));
    for (std::string& name : names) name.insert(0, FolderIn(stem));
  }
  names.erase(std::remove_if(names.begin(), names.end(),
                             [&stem](const std::string& name) {
                               return StemOfShardFile(name) != stem;
                             }),
              names.end());
  return names;
}

absl::StatusOr<Catalog> SourceFolder::ReadFileOrIndex(
    const std::string& name) const {
  return absl::EndsWith(name, kIndexEnding) ? ReadIndexed(name)
                                            : ReadAll({name});
}

absl::StatusOr<Catalog> SourceFolder::ReadModel() const {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files_.List(root_));
  std::vector<std::string> indices;
  std::vector<std::string> weights;
  for (const std::string& name : names) {
    if (absl::EndsWith(name, kIndexEnding)) indices.push_back(name);
    if (absl::EndsWith(name, kEnding)) weights.push_back(name);
  }
  if (indices.size() == 1) return ReadIndexed(indices.front());
  if (indices.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(root_, " has several models: ", indices[0], " and ",
                     indices[1], ": name the one that is to be loaded"));
  }
  const std::string usual = absl::StrCat("model", kEnding);
  if (std::find(weights.begin(), weights.end(), usual) != weights.end()) {
    return ReadAll({usual});
  }
  if (!weights.empty()) return ReadAll(weights);
  if (std::find(names.begin(), names.end(), kDcpMetadataFile) != names.end()) {
    DcpCatalogOptions options;
    options.model_only = true;
    return ReadDcpCatalog(files_, root_, options);
  }
  return absl::NotFoundError(
      absl::StrCat(root_, " has no model: neither *", kIndexEnding, " nor *",
                   kEnding, " nor ", kDcpMetadataFile, " is there"));
}

absl::StatusOr<std::unique_ptr<RangeReader>> SourceFolder::Open(
    const Catalog& catalog, const RangeReaderOptions& options) const {
  std::vector<SourceFile> sources;
  for (const StoredFile& file : catalog.files()) {
    FSDP_ASSIGN_OR_RETURN(SourceFile source, SourceOf(file.name));
    sources.push_back(std::move(source));
  }
  return RangeReader::Create(files_, std::move(sources), options);
}

}  // namespace fsdp::checkpoint
