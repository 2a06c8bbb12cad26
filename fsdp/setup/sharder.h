// Makes sharded units of the modules of a plan, one after the other.
#ifndef FSDP_SETUP_SHARDER_H_
#define FSDP_SETUP_SHARDER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
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
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/options/options.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

// Memory for whole parameters that the ranks of a host share: one allocation
// for each group of ranks, cut into pieces. Ranks of a group make the same
// calls in the same order.
class CommonFlats {
 public:
  // Asks for the next piece, of `bytes` for `group`, or leaves it out.
  void Add(std::shared_ptr<comm::Communicator> group, int64_t bytes);
  void AddNone() { ranges_.push_back({0, 0, -1}); }

  // Allocates; call it once. Collective. A group whose ranks cannot share
  // memory gets none, and a group of one rank needs none.
  absl::Status Allocate();

  // Returns piece `number`, from 0, uint8; undefined if there is none.
  at::Tensor Piece(int number) const;

  // Returns a fence for each group that got memory.
  std::vector<std::unique_ptr<comm::Fence>> TakeFences();

 private:
  struct Group {
    std::shared_ptr<comm::Communicator> communicator;
    int64_t bytes = 0;
    comm::CommonMemory common;
  };
  struct Range {
    size_t group;
    int64_t begin;
    int64_t bytes;  // -1: left out
  };

  std::vector<Group> groups_;
  std::vector<Range> ranges_;
};

// Splits and quantises each group once, however many units use it.
class Placements {
 public:
  // `quantization` must outlive this object.
  Placements(const comm::Mesh& mesh, const Quantization& quantization)
      : mesh_(mesh), quantization_(quantization) {}

  // Returns the groups of a unit. Collective, in the same order on all ranks.
  // `options` must have been checked.
  absl::StatusOr<Placement> Of(const UnitOptions& options);

  // Returns whether gathers of `placement` are quantised.
  bool QuantizesGathers(const Placement& placement) const;
  // Adds the quantised group to `placement`. `exact_tail` counts the last
  // elements of each rank's part of a sum, which stay exact.
  absl::Status Quantize(int64_t exact_tail, Placement& placement);

 private:
  using Group = std::shared_ptr<comm::Communicator>;

  absl::StatusOr<Group> Split(const Group& group, int size);

  const comm::Mesh mesh_;
  const Quantization& quantization_;
  std::map<std::pair<const void*, int>, Group> split_;
  std::map<std::pair<const void*, int64_t>, Group> quantized_;
};

// All ranks make the same calls in the order of this list. After an error of
// any but MakeOffloadSpace() the ranks are no longer alike.
class Sharder {
 public:
  // `options` must outlive this object.
  Sharder(ShardPlan plan, const comm::Mesh& mesh, const Options& options,
          absl::Duration timeout);

  const ShardPlan& plan() const { return plan_; }

  // Decides which tier everything rests in, and makes room there. An error is
  // the same on all ranks.
  absl::Status MakeOffloadSpace(
      const std::shared_ptr<comm::Communicator>& world);
  // Null without Options::offload.
  const std::shared_ptr<OffloadSpace>& offload() const { return space_; }

  // Allocates memory that ranks share.
  absl::Status AllocateCommon();
  std::vector<std::unique_ptr<comm::Fence>> TakeFences() {
    return common_.TakeFences();
  }

  // Shards a unit. Call it for each unit of the plan, in its order.
  absl::StatusOr<RuntimeUnit> Shard(const PlannedUnit& planned);

  // Finishes what is in no unit: buffers get rank 0's values everywhere, and
  // ignored parameters keep each rank's own.
  absl::Status FinishRest(torch::nn::Module& root);

 private:
  GradientBufferOptions GradientsOf(const PlannedUnit& planned,
                                    const FlatKind& kind) const;
  absl::StatusOr<std::vector<RestingFlat>> RestingFlats();
  // Returns the CPU for a model without parameters.
  c10::Device DeviceOfModel() const;

  // Makes the last flat parameter of `unit`, number `index` of all.
  absl::Status MakeFlat(const PlannedUnit& planned, int index,
                        const FlatKind& kind, FlatParameters parameters,
                        RuntimeUnit& unit);
  absl::StatusOr<at::Tensor> PlaceShard(int index,
                                        const flat_param::FlatLayout& layout,
                                        c10::ScalarType stored,
                                        RuntimeUnit& unit);
  bool IsLoadedLater(const flat_param::NamedParameter& parameter) const;
  at::Tensor Flatten(const FlatParameters& parameters,
                     const flat_param::FlatLayout& layout,
                     bool is_broadcast) const;

  // Returns whether this rank's values are the ones that count.
  bool has_values() const;
  absl::Status Broadcast(const at::Tensor& tensor, const std::string& what);

  ShardPlan plan_;
  comm::Communicator& world_;
  Placements placements_;
  const Options& options_;
  const absl::Duration timeout_;
  ModuleInitializer initializer_;
  std::shared_ptr<OffloadSpace> space_;  // null: nothing is offloaded
  CommonFlats common_;                   // a piece for each flat parameter
  int next_flat_ = 0;
};

}  // namespace fsdp

#endif  // FSDP_SETUP_SHARDER_H_
