#include "checkpoint/testing/sample_tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/catalog/shard_files.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/files/file_names.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/huggingface/file_plan.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/archive_reader.h"
#include "checkpoint/torch_archive/crc32.h"
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint::testing {
namespace {

// Small, so that there are several.
constexpr int64_t kMaxFileBytes = 4096;
constexpr int64_t kMaxChunkBytes = 1000;

absl::StatusOr<std::vector<SampleTensor>> ReadArchiveSample(
    const std::string& path) {
  const std::string file = ReadWholeFile(path);
  FSDP_ASSIGN_OR_RETURN(
      const Value value,
      ReadArchive(ReadFrom(file), 0, static_cast<int64_t>(file.size())));
  if (value.dict() == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has no dict"));
  }
  std::vector<SampleTensor> tensors;
  for (const auto& [key, item] : value.dict()->items) {
    const auto* const name = std::get_if<std::string>(&key.is);
    const ArchiveTensor* const tensor = item.tensor();
    if (name == nullptr || tensor == nullptr || !tensor->IsContiguous()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, " has what is no tensor in order"));
    }
    SampleTensor sample{{*name, tensor->dtype, tensor->shape}, ""};
    FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(sample.info));
    sample.bytes = file.substr(static_cast<size_t>(tensor->FirstByte()),
                               static_cast<size_t>(bytes));
    tensors.push_back(std::move(sample));
  }
  return tensors;
}

absl::StatusOr<std::vector<SampleTensor>> ReadCatalog(
    const SourceFolder& folder, const Catalog& catalog) {
  FSDP_ASSIGN_OR_RETURN(const auto reader,
                        folder.Open(catalog, RangeReaderOptions()));
  std::vector<SampleTensor> tensors;
  for (const StoredTensor& stored : catalog.tensors()) {
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(stored.info));
    FSDP_ASSIGN_OR_RETURN(const std::vector<FileRun> runs,
                          RunsOf(stored, 0, numel));
    SampleTensor& sample = tensors.emplace_back();
    sample.info = stored.info;
    std::vector<ReadRange> ranges;
    ranges.reserve(runs.size());
    for (const FileRun& run : runs) {
      ranges.push_back({run.file, run.offset, run.bytes});
    }
    FSDP_RETURN_IF_ERROR(reader->Read(
        ranges, [&sample](size_t, int64_t, absl::Span<const char> bytes) {
          sample.bytes.append(bytes.data(), bytes.size());
          return absl::OkStatus();
        }));
  }
  return tensors;
}

absl::Status Save(const std::string& path, absl::string_view bytes) {
  return ReplaceFile(RealFileSystem(), path, bytes);
}

std::vector<TensorInfo> InfosOf(absl::Span<const SampleTensor> tensors) {
  std::vector<TensorInfo> infos;
  for (const SampleTensor& tensor : tensors) infos.push_back(tensor.info);
  return infos;
}

absl::Status WriteHuggingFace(absl::Span<const SampleTensor> tensors,
                              const std::string& folder,
                              const FilePlanOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const FilePlan plan,
                        PlanFiles(InfosOf(tensors), options));
  std::vector<std::string> files;
  for (const PlannedFile& file : plan.files) {
    files.push_back(file.header);
    files.back().resize(static_cast<size_t>(file.bytes));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const PlannedTensor& place = plan.tensors[i];
    files[place.file].replace(place.offset, place.bytes, tensors[i].bytes);
  }
  for (size_t i = 0; i < files.size(); ++i) {
    FSDP_RETURN_IF_ERROR(Save(JoinPath(folder, plan.files[i].name), files[i]));
  }
  if (plan.index.empty()) return absl::OkStatus();
  return Save(JoinPath(folder, plan.index_name), plan.index);
}

// A rank's equal part.
std::pair<int64_t, int64_t> PartOf(int64_t numel, int rank, int ranks) {
  return {numel * rank / ranks, numel * (rank + 1) / ranks};
}

absl::Status WriteShards(absl::Span<const SampleTensor> tensors,
                         const std::string& folder, int rank, int ranks) {
  std::vector<RankRange> ranges;
  for (const SampleTensor& tensor : tensors) {
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
    const auto [begin, end] = PartOf(numel, rank, ranks);
    ranges.push_back({tensor.info, begin, end});
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<ShardFile> files,
                        PlanShardFiles(rank, ranges));
  for (const ShardFile& file : files) {
    std::string bytes = file.header;
    bytes.resize(static_cast<size_t>(file.bytes));
    for (const ShardPiece& piece : file.pieces) {
      const SampleTensor& tensor = tensors[piece.range];
      const int64_t item = ItemBytes(tensor.info.dtype);
      const int64_t count = (piece.end - piece.begin) * item;
      bytes.replace(piece.offset, count, tensor.bytes, piece.begin * item,
                    count);
    }
    FSDP_RETURN_IF_ERROR(Save(JoinPath(folder, file.name), bytes));
  }
  return absl::OkStatus();
}

std::string Fill(const DcpRankFile& layout,
                 absl::Span<const SampleTensor> samples,
                 absl::Span<const DcpWriteTensor> tensors) {
  std::string file(static_cast<size_t>(layout.bytes), '\0');
  for (const DcpFileChunk& chunk : layout.chunks) {
    const SampleTensor& sample = samples[chunk.tensor];
    const int64_t first = chunk.first * ItemBytes(sample.info.dtype);
    const std::string bytes = sample.bytes.substr(first, chunk.bytes);
    file.replace(chunk.payload, chunk.bytes, bytes);
    for (const ArchivePiece& piece :
         FrameDcpChunk(tensors[chunk.tensor], chunk, Crc32(bytes))) {
      file.replace(piece.offset, piece.bytes.size(), piece.bytes);
    }
  }
  return file;
}

absl::Status WriteDcp(absl::Span<const SampleTensor> samples,
                      const std::string& folder, int ranks) {
  std::vector<DcpWriteTensor> tensors;
  for (const SampleTensor& sample : samples) {
    const DcpPath path = {"model", sample.info.name};
    tensors.push_back({sample.info, path});
    tensors.back().info.name = DcpName(path);
  }
  std::vector<DcpRankFile> layouts;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<DcpRange> ranges;
    for (size_t i = 0; i < samples.size(); ++i) {
      FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(samples[i].info));
      const auto [begin, end] = PartOf(numel, rank, ranks);
      if (begin < end || (numel == 0 && rank == 0)) {
        ranges.push_back({static_cast<int>(i), begin, end});
      }
    }
    FSDP_ASSIGN_OR_RETURN(
        DcpRankFile layout,
        LayOutDcpFile(rank, tensors, ranges, {}, kMaxChunkBytes));
    FSDP_RETURN_IF_ERROR(
        Save(JoinPath(folder, layout.name), Fill(layout, samples, tensors)));
    layouts.push_back(std::move(layout));
  }
  FSDP_ASSIGN_OR_RETURN(const std::string metadata,
                        DcpMetadataBytes(tensors, {}, layouts));
  return Save(JoinPath(folder, kDcpMetadataFile), metadata);
}

absl::Status WriteArchive(absl::Span<const SampleTensor> tensors,
                          const std::string& path) {
  Value::Dict dict;
  std::vector<std::string> payloads;
  for (const SampleTensor& tensor : tensors) {
    ArchiveTensor value;
    value.dtype = tensor.info.dtype;
    value.shape = tensor.info.shape;
    dict.items.push_back({Value{tensor.info.name}, Value{std::move(value)}});
    payloads.push_back(tensor.bytes);
  }
  FSDP_ASSIGN_OR_RETURN(const ArchiveLayout layout,
                        ArchiveLayout::Create(Value{std::move(dict)}));
  return Save(path, Assemble(layout, payloads));
}

}  // namespace

std::string LineOf(const SampleTensor& tensor) {
  return absl::StrCat(tensor.info.name, " ", NameOf(tensor.info.dtype), " [",
                      absl::StrJoin(tensor.info.shape, ","), "] ",
                      absl::Hex(Crc32(tensor.bytes), absl::kZeroPad8));
}

std::vector<SampleTensor> PatternTensors() {
  std::vector<SampleTensor> tensors;
  const auto add = [&tensors](std::string name, Dtype dtype,
                              std::vector<int64_t> shape) {
    const auto number = static_cast<int64_t>(tensors.size());
    SampleTensor tensor{{std::move(name), dtype, std::move(shape)}, ""};
    // Small: no element is a NaN, and bools are 0 or 1.
    const int64_t limit = dtype == Dtype::kBool ? 2 : 64;
    for (int64_t i = 0; i < *BytesOf(tensor.info); ++i) {
      tensor.bytes.push_back(static_cast<char>((37 * number + 11 * i) % limit));
    }
    tensors.push_back(std::move(tensor));
  };
  add("layers.0.weight", Dtype::kF32, {5, 7, 3});
  add("layers.0.bias", Dtype::kBF16, {11});
  add("half", Dtype::kF16, {13, 3});
  add("double", Dtype::kF64, {2, 2});
  add("i64", Dtype::kI64, {3});
  add("i32", Dtype::kI32, {4, 1});
  add("i16", Dtype::kI16, {2});
  add("i8", Dtype::kI8, {7});
  add("u8", Dtype::kU8, {5});
  add("bool", Dtype::kBool, {4});
  add("f8", Dtype::kF8E4M3, {3, 5});
  add("f8e5m2", Dtype::kF8E5M2, {3});
  add("large", Dtype::kF32, {64, 33});
  add("scalar", Dtype::kF32, {});
  add("empty", Dtype::kF32, {0, 3});
  return tensors;
}

absl::StatusOr<std::vector<SampleTensor>> ReadSample(const std::string& path) {
  FileSystem& files = RealFileSystem();
  FSDP_ASSIGN_OR_RETURN(const FileInfo info, files.Stat(path));
  if (info.kind == FileInfo::Kind::kFolder) {
    const SourceFolder folder(files, path, /*sums=*/nullptr);
    FSDP_ASSIGN_OR_RETURN(const Catalog catalog, folder.ReadModel());
    return ReadCatalog(folder, catalog);
  }
  if (!absl::EndsWith(path, ".safetensors") &&
      !absl::EndsWith(path, ".index.json")) {
    return ReadArchiveSample(path);
  }
  const SourceFolder folder(files, FolderOf(path), /*sums=*/nullptr);
  FSDP_ASSIGN_OR_RETURN(const Catalog catalog,
                        folder.ReadFileOrIndex(std::string(LastPart(path))));
  return ReadCatalog(folder, catalog);
}

absl::Status WriteSample(absl::Span<const SampleTensor> tensors,
                         absl::string_view format, const std::string& path,
                         int ranks) {
  if (format == "torch") return WriteArchive(tensors, path);
  FSDP_RETURN_IF_ERROR(RealFileSystem().MakeFolder(path).status());
  if (format == "dcp") return WriteDcp(tensors, path, ranks);
  FilePlanOptions options;
  if (format == "safetensors") return WriteHuggingFace(tensors, path, options);
  options.max_file_bytes = kMaxFileBytes;
  if (format == "huggingface") return WriteHuggingFace(tensors, path, options);
  if (format != "shards") {
    return absl::InvalidArgumentError(absl::StrCat("no format ", format));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    FSDP_RETURN_IF_ERROR(WriteShards(tensors, path, rank, ranks));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint::testing
