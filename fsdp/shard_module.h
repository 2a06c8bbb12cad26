// Turns a module's parameters into shards; FullyShard() without the type.
#ifndef FSDP_SHARD_MODULE_H_
#define FSDP_SHARD_MODULE_H_

#include <torch/nn/module.h>

#include <memory>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/options/options.h"

namespace fsdp {

// Shards `root` over the ranks of `mesh`. Collective. In a mesh of two
// dimensions the first replicates and the second shards, for units whose
// strategy is hybrid. Units are sharded one after another: beyond the units
// that are still to be sharded, a rank holds its shards and at most two copies
// of one unit. Modules do not change, except that a Sequential calls its
// children that are units through fsdp::Forward.
//
// All ranks check before anything is changed. If one rank refuses, all refuse
// with the same text:
//   InvalidArgument     there are no parameters, or some cannot be sharded (see
//                       ReadModuleTree); one unit is on two devices; options
//                       make no sense, alone or with this mesh; models or
//                       options differ between ranks
//   FailedPrecondition  parameters belong to a unit already, or an optimizer
//                       seems to hold them; inference mode is on; a
//                       DeferredInit scope is open
absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options);

}  // namespace fsdp

#endif  // FSDP_SHARD_MODULE_H_
