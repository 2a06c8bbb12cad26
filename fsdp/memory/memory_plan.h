// How much memory a rank uses, as numbers: counted, with the rule by which a
// BufferPool reuses memory, and predicted before the first step, by running the
// schedule without a model and without tensors.
#ifndef FSDP_MEMORY_MEMORY_PLAN_H_
#define FSDP_MEMORY_MEMORY_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

struct ScheduledUnit;
struct ScheduleOptions;

// Memory of one pool of buffers.
struct PoolStats {
  int64_t in_use_bytes = 0;       // handed out at present
  int64_t peak_in_use_bytes = 0;  // most handed out at once
  int64_t reserved_bytes = 0;     // allocated, handed out or not
  int64_t allocations = 0;        // in all, without discarded buffers
};

// Memory of one rank, without shards.
struct MemoryStats {
  PoolStats parameters;  // buffers that parameters are gathered into
  PoolStats gradients;   // reduce buffers
};

namespace internal {

// Returns whether a buffer of `size` bytes may be handed out for `bytes`; of
// several the smallest is. If less than half of a buffer would do, a unit much
// larger than others would lend out its memory and have to allocate again.
inline bool Fits(int64_t size, int64_t bytes) {
  constexpr int64_t kLargestWaste = 2;
  return size >= bytes && size <= kLargestWaste * bytes;
}

}  // namespace internal

// The bytes of one unit on this rank.
struct UnitBytes {
  int64_t shard = 0;  // parameters that rest on the device
  int64_t away = 0;   // parameters that rest off the device
  // Parameters, of shard and away together, without optimizer states on the
  // device: frozen ones, and those whose states rest off it.
  int64_t stateless = 0;
  int64_t gradient = 0;  // of the shard
  int64_t copy = 0;      // its part of a copy that all ranks compute with
  int64_t part = 0;      // kept between forward and backward
  // The sizes of buffers, one for each flat parameter: of those to gather into,
  // none where a gather copies nothing, and of those for gradients that are to
  // be reduced, of which each of `ranks` has an equal segment.
  std::vector<int64_t> unsharded = {};
  std::vector<int64_t> reduce_buffers = {};
  int ranks = 1;
  // Messages of a gather and of a reduction that are quantised.
  int64_t gather_messages = 0;
  int64_t reduce_messages = 0;
  bool trainable = true;  // it has gradients
  // The shard takes its gradients without a reduce buffer, unless they are kept
  // whole first.
  bool takes_gradients = false;
  // Backwards before the last of a step reduce this unit, and all-reduce it
  // over the replicate group. If both hold for all units, those backwards keep
  // all gradients whole instead.
  bool synchronizes = true;
  bool all_reduces = true;
};

// The most bytes of one rank, by kind. Gathered units and reduce buffers count
// with the buffers that hold them, which may be larger.
// Activations are not included, nor the gradients that autograd holds of the
// one or two units whose backward is under way.
struct MemoryPlan {
  int64_t shards = 0;     // parameters that rest on the device
  int64_t gradients = 0;  // of shards
  int64_t optimizer = 0;  // states that rest on the device
  int64_t copies = 0;     // of parameters, with which all ranks compute
  int64_t gathered = 0;   // units that are whole
  int64_t parts = 0;      // of units, kept between forward and backward
  int64_t in_flight = 0;  // reduce buffers
  int64_t messages = 0;   // of quantised collectives
  int64_t transfers = 0;  // buffers for offload

  // The sum of the kinds, whose peaks need not be at the same time.
  int64_t total() const {
    return shards + gradients + optimizer + copies + gathered + parts +
           in_flight + messages + transfers;
  }
  // Returns a table with a line for each kind.
  std::string ToString() const;
};

// Numbers of the training that a plan cannot know.
struct MemoryPlanOptions {
  // Bytes of optimizer state per byte of trainable shard: 2 for Adam.
  double optimizer_state = 2;
  // Backwards per optimizer step; only the last reduces everything, and the
  // others what UnitBytes says.
  int backwards_per_step = 1;  // at least 1
};

// Predicts the memory of `units`, which are those of Schedule, with `bytes` of
// each. It assumes that every unit runs once, in the order of the list, inside
// its parent. Gradients keep their memory from the first backward on, or with
// step_in_backward one unit at a time.
MemoryPlan PlanMemory(const std::vector<ScheduledUnit>& units,
                      const std::vector<UnitBytes>& bytes,
                      const ScheduleOptions& schedule_options,
                      const MemoryPlanOptions& options = MemoryPlanOptions());

}  // namespace fsdp

#endif  // FSDP_MEMORY_MEMORY_PLAN_H_
