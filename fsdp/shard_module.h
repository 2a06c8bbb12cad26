// Turns a module's parameters into shards.
#ifndef FSDP_SHARD_MODULE_H_
#define FSDP_SHARD_MODULE_H_

#include <torch/nn/module.h>

#include <memory>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/options/options.h"

namespace fsdp {

// Collective over the ranks of `mesh`. With two dimensions the first replicates
// and the second shards, for units whose strategy is hybrid. Unit after unit,
// so that a rank holds its shards and one unit twice at most beyond what is not
// sharded yet. Modules stay as they are, but for what a Sequential calls of
// its children that are units, which goes through fsdp::Forward.
//
// Every rank checks before anything is changed, and what one refuses all refuse
// with the same text:
//   InvalidArgument     no parameters; parameters that cannot be sharded (see
//                       ReadModuleTree); two devices in one unit; options that
//                       make no sense, alone or with this mesh; models or
//                       options that differ between ranks
//   FailedPrecondition  parameters that belong to a unit already, or that an
//                       optimizer seems to hold; inference mode; inside a
//                       DeferredInit scope
absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options);

}  // namespace fsdp

#endif  // FSDP_SHARD_MODULE_H_
