#include "fsdp/fully_sharded_data_parallel.h"

#include <ATen/core/Tensor.h>

#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/grad_clip.h"

namespace fsdp {

std::vector<at::Tensor> ShardedModuleBase::Parameters() const {
  std::vector<at::Tensor> parameters;
  parameters.reserve(NamedShards().size());
  for (const NamedShard& named : NamedShards()) {
    parameters.push_back(named.shard);
  }
  return parameters;
}

absl::StatusOr<at::Tensor> ShardedModuleBase::ClipGradNorm(double max_norm,
                                                           double norm_type) {
  ClipGradNormOptions options;
  options.max_norm = max_norm;
  options.norm_type = norm_type;
  return fsdp::ClipGradNorm(communicator(), NamedShards(), options);
}

}  // namespace fsdp
