// Whole tensors out of the ranks' shards, for what happens between steps.
#ifndef FSDP_STATE_SHARD_GATHER_H_
#define FSDP_STATE_SHARD_GATHER_H_

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

// All ranks' shards of one flat parameter of a unit, or of anything laid out
// like it, in memory of its own: 1-D, layout.padded_numel(), of the shard's
// dtype. Collective over the ranks that the unit is sharded on. When it fails
// the model's groups are aborted: other ranks wait in groups of theirs.
absl::StatusOr<at::Tensor> GatherShards(const ShardedModel& model, int unit,
                                        const at::Tensor& shard,
                                        absl::string_view label);

// This rank's shard of the gradients of `flat`, zero where there is none.
at::Tensor ShardOfGradients(const flat_param::FlatParameter& flat);

}  // namespace fsdp

#endif  // FSDP_STATE_SHARD_GATHER_H_
