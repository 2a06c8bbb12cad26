// What a Runtime is given: units and hooks.
#ifndef FSDP_RUNTIME_RUNTIME_UNIT_H_
#define FSDP_RUNTIME_RUNTIME_UNIT_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/placement.h"
#include "fsdp/runtime/reduction_hooks.h"

namespace fsdp {

// Memory that the ranks of a unit's group have in common, for a flat parameter
// of the compute dtype: every rank computes with the same copy of it.
struct SharedFlat {
  at::Tensor memory;          // undefined: there is none
  bool holds_shards = false;  // the ranks' shards rest in it, side by side
};

// A unit's flat parameters, one for each pair of dtypes and whether they are
// frozen when the model is sharded; none for a root that owns nothing.
// `gradients` has one entry for each.
struct RuntimeUnit {
  std::string name;
  Placement placement;
  // One for each flat parameter; none: no memory is shared.
  std::vector<SharedFlat> shared;
  // What their shards lie in; null for memory of their own. None: all of it is.
  std::vector<std::shared_ptr<RestingMemory>> resting;
  std::vector<std::unique_ptr<flat_param::FlatParameter>> flats;
  std::vector<GradientBufferOptions> gradients;
};

struct RuntimeHooks {
  ReduceScatterHook reduce_scatter;  // unset: the communicator's
  AllReduceHook all_reduce;          // unset: the communicator's
  // At kStep, when all gradients of the unit's shards are there.
  std::function<absl::Status(int unit)> step;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_UNIT_H_
