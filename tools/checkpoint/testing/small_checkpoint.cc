#include "tools/checkpoint/testing/small_checkpoint.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/format/file_plan.h"

namespace fsdp::checkpoint::tool::testing {
namespace {

using checkpoint::testing::Contents;

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

}  // namespace

SmallTensor Floats(std::string name, std::vector<int64_t> shape,
                   const std::vector<float>& values) {
  return {{std::move(name), Dtype::kF32, std::move(shape)}, Raw(values)};
}

std::vector<SmallTensor> SmallModel(float scalar) {
  return {Floats("w", {3, 4}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}),
          {{"b", Dtype::kBF16, {5}}, Raw(std::vector<uint16_t>(5, 0x3f80))},
          Floats("scalar", {}, {scalar}),
          Floats("empty", {0, 3}, {}),
          {{"ids", Dtype::kI64, {3}}, Raw<int64_t>({-1, 0, 1})}};
}

Contents ModelFiles(absl::Span<const SmallTensor> model,
                    const std::string& stem, int64_t max_file_bytes) {
  std::vector<TensorInfo> infos;
  for (const SmallTensor& tensor : model) infos.push_back(tensor.info);
  FilePlanOptions options;
  options.stem = stem;
  options.max_file_bytes = max_file_bytes;
  const absl::StatusOr<FilePlan> plan = PlanFiles(infos, options);
  FSDP_CHECK(plan.ok());
  Contents contents;
  for (const PlannedFile& file : plan->files) {
    contents[file.name] = file.header;
    contents[file.name].resize(static_cast<size_t>(file.bytes));
  }
  for (size_t i = 0; i < model.size(); ++i) {
    const PlannedTensor& place = plan->tensors[i];
    contents[plan->files[place.file].name].replace(
        static_cast<size_t>(place.offset), model[i].bytes.size(),
        model[i].bytes);
  }
  if (!plan->index_name.empty()) contents[plan->index_name] = plan->index;
  return contents;
}

Contents RankFiles(absl::Span<const SmallTensor> model, int ranks) {
  Contents contents;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<RankRange> ranges;
    for (const SmallTensor& tensor : model) {
      const int64_t numel = *NumelOf(tensor.info);
      ranges.push_back(
          {tensor.info, numel * rank / ranks, numel * (rank + 1) / ranks});
    }
    const absl::StatusOr<std::vector<ShardFile>> files =
        PlanShardFiles(rank, ranges);
    FSDP_CHECK(files.ok());
    for (const ShardFile& file : *files) {
      std::string& bytes = contents[file.name];
      bytes = file.header;
      bytes.resize(static_cast<size_t>(file.bytes));
      for (const ShardPiece& piece : file.pieces) {
        const SmallTensor& tensor = model[piece.range];
        const int64_t item = ItemBytes(tensor.info.dtype);
        bytes.replace(
            static_cast<size_t>(piece.offset),
            static_cast<size_t>((piece.end - piece.begin) * item),
            tensor.bytes.substr(
                static_cast<size_t>(piece.begin * item),
                static_cast<size_t>((piece.end - piece.begin) * item)));
      }
    }
  }
  return contents;
}

absl::Status WriteFolder(FileSystem& files, const std::string& folder,
                         const Contents& contents) {
  FSDP_RETURN_IF_ERROR(files.MakeFolder(folder).status());
  return checkpoint::testing::WriteFiles(files, folder, 0, contents).status();
}

absl::Status SaveRun(FileSystem& files, const std::string& root, int64_t step,
                     absl::Span<const SmallTensor> model) {
  Contents contents = ModelFiles(model);
  for (auto& [name, bytes] : ModelFiles(model.first(1), "exp_avg")) {
    contents[absl::StrCat("optimizer/", name)] = bytes;
  }
  for (auto& [name, bytes] : ModelFiles(model.first(1), "rank-00000")) {
    contents[absl::StrCat("ranks/", name)] = bytes;
  }
  contents["training.json"] = "{}";
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointFolder> folder,
                        CheckpointFolder::Claim(files, root));
  return checkpoint::testing::Save(files, *folder, step, contents);
}

absl::Status FlipByte(FileSystem& files, const std::string& path,
                      int64_t offset) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> before,
                        files.OpenForReading(path, Caching::kCached));
  char byte = 0;
  FSDP_RETURN_IF_ERROR(before->PRead(offset, absl::MakeSpan(&byte, 1)));
  byte = static_cast<char>(byte ^ 1);
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        files.OpenForWriting(path, Caching::kCached));
  return file->PWrite(offset, absl::MakeConstSpan(&byte, 1));
}

}  // namespace fsdp::checkpoint::tool::testing
