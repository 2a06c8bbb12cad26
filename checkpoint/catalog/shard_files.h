// Files of one rank alone, for storage without random writes: safetensors with
// DCP's sharding info.
#ifndef CHECKPOINT_CATALOG_SHARD_FILES_H_
#define CHECKPOINT_CATALOG_SHARD_FILES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint {

// A rank's part of a tensor: the elements [begin, end), row-major.
struct RankRange {
  TensorInfo tensor;
  int64_t begin = 0;
  int64_t end = 0;
};

// What goes to one place of a file.
struct ShardPiece {
  int range = 0;      // in the ranges given
  int64_t begin = 0;  // elements of the tensor
  int64_t end = 0;
  int64_t offset = 0;  // bytes from the beginning of the file
};

struct ShardFile {
  std::string name;    // "shard-00003-model-00001-of-00002.safetensors"
  std::string header;  // the bytes it begins with
  int64_t bytes = 0;   // of the whole file
  std::vector<ShardPiece> pieces;
};

// The files of a rank, whose `ranges` are of all tensors in an order that all
// ranks have: pieces say their places in it. A range is cut into boxes. Readers
// in PyTorch up to 2.11 take one box of a tensor from a file, under the
// tensor's own name, and every file with this ending; so the k-th box of each
// range goes into the rank's k-th file. A rank that has cut a parameter only at
// its first and its last element needs two or three files, and one without
// elements none, unless it is rank 0. Newer readers need no other keys;
// "global_shape" tells them, and CatalogOfSafetensors(), of pieces that are
// missing. Tensors without elements are in a file of rank 0. `stem`: in place
// of the "model" of the names. InvalidArgument, naming the tensor: a name given
// twice, a range that the tensor does not have, elements that do not fill
// bytes.
absl::StatusOr<std::vector<ShardFile>> PlanShardFiles(
    int rank, absl::Span<const RankRange> ranges,
    absl::string_view stem = "model");

// "optimizer/exp_avg" of "optimizer/shard-00003-exp_avg-00001-of-00002" and the
// ending; none for other names.
std::optional<std::string> StemOfShardFile(absl::string_view name);

// Which part of which tensor a safetensors file of one rank has, as PyTorch's
// distributed checkpoints (DCP) say it: JSON under one key of the metadata,
//   {"layer.weight": {"saved_offsets": [8, 0]}},
// with "logical_fqn" and "global_shape" from newer writers, and, which others
// do not look at, our "tensor_position".

inline constexpr absl::string_view kShardingInfoKey = "DCP_SHARDING_INFO";

struct ShardEntry {
  std::string tensor;            // of which it is a part
  std::vector<int64_t> offsets;  // of the part in the tensor
  std::optional<std::vector<int64_t>> global_shape;
  // Among all tensors, in the order of the model.
  std::optional<int64_t> position = std::nullopt;
};

// By the name that the part has in the file.
using ShardingInfo = std::map<std::string, ShardEntry>;

std::string FormatShardingInfo(const ShardingInfo& info);

// InvalidArgument, naming the entry, for anything else.
absl::StatusOr<ShardingInfo> ParseShardingInfo(absl::string_view json);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_CATALOG_SHARD_FILES_H_
