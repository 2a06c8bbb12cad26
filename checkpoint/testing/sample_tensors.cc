#include "checkpoint/testing/sample_tensors.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/files/file_system.h"
#include "base/status_macros.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/load/source_folder.h"

namespace fsdp::checkpoint::testing {
namespace {

// Small, so that there are several.
constexpr int64_t kMaxFileBytes = 4096;

absl::StatusOr<std::vector<SampleTensor>> ReadCatalog(
    const SourceFolder& folder, const Catalog& catalog) {
  FSDP_ASSIGN_OR_RETURN(const auto reader,
                        folder.Open({&catalog}, RangeReaderOptions()));
  std::vector<SampleTensor> tensors;
  for (const StoredTensor& stored : catalog.tensors()) {
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(stored.info));
    FSDP_ASSIGN_OR_RETURN(const auto runs, RunsOf(stored, 0, numel));
    SampleTensor& sample = tensors.emplace_back();
    sample.info = stored.info;
    const std::vector<FilePlace> ranges(runs.begin(), runs.end());
    FSDP_RETURN_IF_ERROR(reader->Read(
        ranges, [&sample](size_t, int64_t, absl::Span<const char> bytes) {
          sample.bytes.append(bytes.data(), bytes.size());
          return absl::OkStatus();
        }));
  }
  return tensors;
}

// As zlib has it.
uint32_t Crc32(const std::string& bytes) {
  uint32_t sum = ~uint32_t{0};
  for (const char byte : bytes) {
    sum ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      sum = sum >> 1 ^ (sum % 2 == 1 ? 0xedb88320U : 0U);
    }
  }
  return ~sum;
}

}  // namespace

SampleTensor Floats(const std::string& name, const std::vector<int64_t>& shape,
                    const std::vector<float>& values) {
  return {{name, Dtype::kF32, shape},
          std::string(reinterpret_cast<const char*>(values.data()),
                      values.size() * sizeof(float))};
}

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

std::map<std::string, std::string> ModelFiles(
    absl::Span<const SampleTensor> tensors, const std::string& stem,
    int64_t max_file_bytes) {
  std::vector<TensorInfo> infos;
  for (const SampleTensor& tensor : tensors) infos.push_back(tensor.info);
  const absl::StatusOr<FilePlan> plan = PlanFiles(infos, stem, max_file_bytes);
  FSDP_CHECK(plan.ok());
  std::map<std::string, std::string> files;
  for (const PlannedFile& file : plan->files) {
    files[file.name] = file.header;
    files[file.name].resize(static_cast<size_t>(file.bytes));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& place = plan->tensors[i];
    files[plan->files[place.file].name].replace(place.offset, place.bytes,
                                                tensors[i].bytes);
  }
  return files;
}

std::map<std::string, std::string> RankFiles(
    absl::Span<const SampleTensor> tensors, int ranks) {
  std::map<std::string, std::string> files;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<RankRange> ranges;
    for (const SampleTensor& tensor : tensors) {
      const int64_t numel = *NumelOf(tensor.info);
      ranges.push_back(
          {tensor.info, numel * rank / ranks, numel * (rank + 1) / ranks});
    }
    const auto planned = PlanShardFiles(rank, ranges);
    FSDP_CHECK(planned.ok());
    for (const ShardFile& file : *planned) {
      std::string& bytes = files[file.name];
      bytes = file.header;
      bytes.resize(static_cast<size_t>(file.bytes));
      for (const ShardPiece& piece : file.pieces) {
        const SampleTensor& tensor = tensors[piece.range];
        const int64_t item = ItemBytes(tensor.info.dtype);
        const int64_t count = (piece.end - piece.begin) * item;
        bytes.replace(piece.offset, count, tensor.bytes, piece.begin * item,
                      count);
      }
    }
  }
  return files;
}

absl::StatusOr<std::vector<SampleTensor>> ReadSample(const std::string& path) {
  FileSystem& files = RealFileSystem();
  FSDP_ASSIGN_OR_RETURN(const FileInfo info, files.Stat(path));
  if (info.kind == FileInfo::Kind::kFolder) {
    const SourceFolder folder(files, path, /*sums=*/std::nullopt);
    FSDP_ASSIGN_OR_RETURN(const Catalog catalog, folder.ReadModel());
    return ReadCatalog(folder, catalog);
  }
  const SourceFolder folder(files, FolderOf(path), /*sums=*/std::nullopt);
  FSDP_ASSIGN_OR_RETURN(const Catalog catalog,
                        folder.ReadFileOrIndex(std::string(LastPart(path))));
  return ReadCatalog(folder, catalog);
}

absl::Status WriteSample(absl::Span<const SampleTensor> tensors,
                         absl::string_view format, const std::string& path,
                         int ranks) {
  std::map<std::string, std::string> contents;
  if (format == "safetensors") {
    contents = ModelFiles(tensors);
  } else if (format == "huggingface") {
    contents = ModelFiles(tensors, "model", kMaxFileBytes);
  } else if (format == "shards") {
    contents = RankFiles(tensors, ranks);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("no format ", format));
  }
  FileSystem& files = RealFileSystem();
  FSDP_RETURN_IF_ERROR(files.MakeFolder(path).status());
  for (const auto& [name, bytes] : contents) {
    FSDP_RETURN_IF_ERROR(ReplaceFile(files, JoinPath(path, name), bytes));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint::testing
