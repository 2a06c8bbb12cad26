// Makes sharded units of the modules of a plan, one after the other.
#ifndef FSDP_SETUP_SHARDER_H_
#define FSDP_SETUP_SHARDER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

// All ranks make the same calls in the order of this list. After an error of
// any but MakeOffloadSpace() the ranks are no longer alike.
class Sharder {
 public:
  // `options` must outlive this object.
  Sharder(ShardPlan plan, const comm::Mesh& mesh, const Options& options,
          absl::Duration timeout);

  const ShardPlan& plan() const { return plan_; }

  // Splits groups, and lays units out over their ranks.
  absl::Status PlaceUnits();

  // Decides which tier everything rests in, and makes room there. An error is
  // the same on all ranks.
  absl::Status MakeOffloadSpace();
  // Null without Options::offload.
  const std::shared_ptr<OffloadSpace>& offload() const { return space_; }

  // Shards the units of `root`, one after the other, and finishes what is in
  // none: buffers get rank 0's values everywhere, and ignored parameters keep
  // each rank's own.
  absl::StatusOr<std::vector<RuntimeUnit>> Shard(torch::nn::Module& root);

  // Returns a fence for each group that shares memory.
  std::vector<std::unique_ptr<comm::Fence>> TakeFences() {
    return std::move(fences_);
  }

 private:
  using Group = std::shared_ptr<comm::Communicator>;

  // Returns the groups of a unit, whose options have been checked. Collective.
  absl::StatusOr<Placement> PlacementOf(const UnitOptions& options);
  // Splits each group once, however many units use it.
  absl::StatusOr<Group> Split(const Group& group, int size);
  // Adds the quantised group to `placement`. `exact_tail` counts the last
  // elements of each rank's part of a sum, which stay exact.
  absl::Status Quantize(int64_t exact_tail, Placement& placement);

  // Allocates memory for whole parameters that the ranks of a host share: one
  // allocation for each group of ranks, cut into pieces.
  absl::Status AllocateCommon();
  absl::Status ShardUnit(size_t unit);
  // Makes the next flat parameter of `unit`, number next_flat_ of all.
  absl::Status MakeFlat(PlannedFlat planned, RuntimeUnit& unit);
  // Returns where this rank's shard rests, or undefined for memory of its own.
  absl::StatusOr<at::Tensor> PlaceShard(const PlannedFlat& planned,
                                        const Placement& placement,
                                        RuntimeFlat& flat);
  at::Tensor Flatten(const PlannedFlat& planned, bool is_broadcast) const;
  absl::Status FinishRest(torch::nn::Module& root);

  // Returns the CPU for a model without parameters.
  c10::Device DeviceOfModel() const;
  // Returns whether this rank's values are the ones that count.
  bool has_values() const;
  absl::Status Broadcast(const at::Tensor& tensor, const std::string& what);

  ShardPlan plan_;
  const comm::Mesh mesh_;
  comm::Communicator& world_;
  const Options& options_;
  const absl::Duration timeout_;
  ModuleInitializer initializer_;
  std::map<std::pair<const void*, int>, Group> split_;
  std::map<std::pair<const void*, int64_t>, Group> quantized_;
  std::shared_ptr<OffloadSpace> space_;  // null: nothing is offloaded
  std::vector<RuntimeUnit> units_;
  std::vector<std::vector<PlannedFlat>> flats_;  // by unit, until it is sharded
  // A piece for each flat parameter, uint8; undefined if there is none.
  std::vector<at::Tensor> common_;
  std::vector<std::unique_ptr<comm::Fence>> fences_;
  int next_flat_ = 0;
};

}  // namespace fsdp

#endif  // FSDP_SETUP_SHARDER_H_
