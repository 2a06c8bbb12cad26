// This rank's part of a sharded parameter, for optimizers.
#ifndef FSDP_MODEL_NAMED_SHARD_H_
#define FSDP_MODEL_NAMED_SHARD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

struct NamedShard {
  std::string name;            // without wrappers: "blocks.0.qkv.weight"
  std::vector<int64_t> sizes;  // of the full parameter
  // A leaf for an optimizer: 1-D, a range of the parameter's storage, maybe
  // empty. Writing it changes the parameter from the next gather on.
  at::Tensor shard;
  int64_t begin;  // where the range begins, in elements
  // Ranks that hold this same range: 1 unless the unit is replicated.
  int replicas = 1;
};

}  // namespace fsdp

#endif  // FSDP_MODEL_NAMED_SHARD_H_
