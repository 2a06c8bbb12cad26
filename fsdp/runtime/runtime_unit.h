// Units and hooks for a Runtime.
#ifndef FSDP_RUNTIME_RUNTIME_UNIT_H_
#define FSDP_RUNTIME_RUNTIME_UNIT_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "comm/communicator.h"
#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/reduction_hooks.h"

namespace fsdp {

// The groups of ranks that a unit is sharded, replicated and gathered over.
struct Placement {
  // The group that the unit is sharded over; with one rank it is not sharded.
  std::shared_ptr<comm::Communicator> shard;
  // Its group all-reduces what has been reduce-scattered; null: no replicas.
  std::shared_ptr<comm::Communicator> replicate;
  // Consecutive ranks of `shard` that gather after kShrink; null: there are
  // none.
  std::shared_ptr<comm::Communicator> part;
  // `shard` again, sending int8 as `quantization` says. It gathers parameters
  // and reduces gradients in training; null: `shard` does.
  std::shared_ptr<comm::Communicator> quantized = nullptr;
  comm::QuantizationOptions quantization = {};

  comm::Communicator& traffic() const {
    return quantized != nullptr ? *quantized : *shard;
  }
  // Returns whether no other rank adds to the unit's gradients.
  bool is_alone() const {
    return shard->world_size() == 1 && replicate == nullptr;
  }
};

// Memory that the ranks of a unit's group share for a flat parameter of the
// compute dtype: every rank computes with the same copy.
struct SharedFlat {
  at::Tensor memory;          // undefined: there is none
  bool holds_shards = false;  // the ranks' shards rest in it, side by side
};

// A unit's flat parameters: one for each pair of dtypes, separately for
// parameters that are frozen when the model is sharded; none for a root that
// owns nothing. `gradients` has one entry for each.
struct RuntimeUnit {
  std::string name;
  Placement placement;
  // One for each flat parameter; empty: no memory is shared.
  std::vector<SharedFlat> shared;
  // Memory that their shards rest in; null for their own. Empty: all have their
  // own.
  std::vector<std::shared_ptr<RestingMemory>> resting;
  std::vector<std::unique_ptr<flat_param::FlatParameter>> flats;
  std::vector<GradientBufferOptions> gradients;
};

struct RuntimeHooks {
  ReduceScatterHook reduce_scatter;  // unset: the communicator's
  AllReduceHook all_reduce;          // unset: the communicator's
  // Called at kStep, when all gradients of the unit's shards are there.
  std::function<absl::Status(int unit)> step;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_UNIT_H_
