// Which part of which tensor a safetensors file of one rank has, as PyTorch's
// distributed checkpoints (DCP) say it: JSON under one key of the metadata,
//   {"layer.weight": {"saved_offsets": [8, 0]}},
// with "logical_fqn" and "global_shape" from newer writers, and, which others
// do not look at, our "tensor_position".
#ifndef CHECKPOINT_CATALOG_SHARDING_INFO_H_
#define CHECKPOINT_CATALOG_SHARDING_INFO_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

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

#endif  // CHECKPOINT_CATALOG_SHARDING_INFO_H_
