#include "fsdp/fully_sharded_data_parallel.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {

std::vector<at::Tensor> ShardedModuleBase::Parameters() const {
  std::vector<at::Tensor> parameters;
  parameters.reserve(NamedShards().size());
  for (const NamedShard& named : NamedShards()) {
    parameters.push_back(named.shard);
  }
  return parameters;
}

}  // namespace fsdp
