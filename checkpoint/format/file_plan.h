// Plans where the tensors of a model lie in the files of a Hugging Face model.
// The plan follows from names, dtypes and shapes alone: every rank computes the
// same one, whatever the number of ranks.
#ifndef CHECKPOINT_FORMAT_FILE_PLAN_H_
#define CHECKPOINT_FORMAT_FILE_PLAN_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint {

// Its name is like "model-00001-of-00003.safetensors".
struct PlannedFile : NamedSize {
  std::string header;  // the bytes it begins with
};

// Returns a file that consists of these bytes.
inline PlannedFile WholeFile(std::string name, std::string bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  return {{std::move(name), size}, std::move(bytes)};
}

// InvalidArgument unless IsPlainFileName().
absl::Status CheckPlainFileName(absl::string_view name);

struct FilePlan {
  // At least one; behind several their index, "model.safetensors.index.json".
  std::vector<PlannedFile> files;
  std::vector<FilePlace> tensors;  // in the order given
};

// Fills files in the given order, by the rule of huggingface_hub: a file ends
// before the tensor that would exceed `max_file_bytes` of tensors, and no
// tensor is split. Names begin with `stem`: "model" gives "model.safetensors".
// Inside a file the order is that of PlaceTensors(). Takes time in proportion
// to the tensors, whose names differ. InvalidArgument: PlaceTensors() or
// FormatSafetensorsHeader() refuses something, or the stem is no file name.
absl::StatusOr<FilePlan> PlanFiles(absl::Span<const TensorInfo> tensors,
                                   absl::string_view stem = "model",
                                   int64_t max_file_bytes = 5'000'000'000);

// The index of a Hugging Face model that has several files.

struct FileIndex {
  // Plain names, each once, sorted. The files may be missing.
  std::vector<std::string> files;
  // Each tensor's name, once, and which of `files` has it, in the order of the
  // text.
  std::vector<std::pair<std::string, int>> weights;
};

// InvalidArgument, naming what is wrong: no JSON, no "weight_map", a name given
// twice, a file that CheckPlainFileName() refuses, a total size that is none,
// or more than 10,000 values in another member than "weight_map". Needs at most
// 32 times the text and 4 MiB of memory.
absl::StatusOr<FileIndex> ParseFileIndex(absl::string_view json);

// Files that one rank alone writes, for storage without random writes:
// safetensors with DCP's sharding info.

// A rank's part of a tensor: the elements [begin, end), row-major.
struct RankRange {
  TensorInfo tensor;
  int64_t begin = 0;
  int64_t end = 0;
};

// A piece of a range that is in one place of a file.
struct ShardPiece {
  int range = 0;      // the index in the ranges given
  int64_t begin = 0;  // elements of the tensor
  int64_t end = 0;
  int64_t offset = 0;  // bytes from the beginning of the file
};

// Its name is like "shard-00003-model-00001-of-00002.safetensors".
struct ShardFile : PlannedFile {
  std::vector<ShardPiece> pieces;
};

// Returns the files of a rank. `ranges` are this rank's of all tensors, in an
// order that all ranks have; pieces say their tensor's place in it. Each range
// is cut into boxes. PyTorch up to 2.11 reads every file with this ending and
// takes one box of a tensor from a file, under the tensor's own name. So the
// k-th box of each range goes into the rank's k-th file. A rank that cuts
// parameters only at its first and last element needs two or three files, a
// rank without elements none, except rank 0, which also has the tensors without
// elements. Newer readers need no other keys; "global_shape" tells them and
// CatalogOfSafetensors() if pieces are missing. `stem` replaces "model" in the
// names. Names of tensors differ, and their elements fill bytes.
absl::StatusOr<std::vector<ShardFile>> PlanShardFiles(
    int rank, absl::Span<const RankRange> ranges,
    absl::string_view stem = "model");

// Returns "optimizer/exp_avg" for
// "optimizer/shard-00003-exp_avg-00001-of-00002.safetensors", and nothing for
// names of another form.
std::optional<std::string> StemOfShardFile(absl::string_view name);

// The sharding info of a safetensors file of one rank says which part of which
// tensor it has. It is that of PyTorch's distributed checkpoints (DCP), JSON
// under one key of the metadata,
//   {"layer.weight": {"saved_offsets": [8, 0]}},
// with "logical_fqn" and "global_shape" from newer writers, and our
// "tensor_position", which others ignore.

inline constexpr absl::string_view kShardingInfoKey = "DCP_SHARDING_INFO";

struct ShardEntry {
  std::string tensor;            // the tensor of which it is a part
  std::vector<int64_t> offsets;  // where the part begins in the tensor
  std::optional<std::vector<int64_t>> global_shape;
  // The tensor's place in the model's order.
  std::optional<int64_t> position = std::nullopt;
};

// By the name that the part has in the file.
using ShardingInfo = std::map<std::string, ShardEntry>;

std::string FormatShardingInfo(const ShardingInfo& info);

// InvalidArgument names the entry that is wrong.
absl::StatusOr<ShardingInfo> ParseShardingInfo(absl::string_view json);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FORMAT_FILE_PLAN_H_
