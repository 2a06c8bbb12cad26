// Units and hooks for a Runtime, and the groups, waits and log of collectives
// that its parts share.
#ifndef FSDP_RUNTIME_RUNTIME_COMMON_H_
#define FSDP_RUNTIME_RUNTIME_COMMON_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/reduction_hooks.h"
#include "fsdp/runtime/step_log.h"

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

// A flat parameter, to which it points, and what becomes of its gradients.
struct RuntimeFlat {
  flat_param::FlatParameter* operator->() const { return parameter.get(); }
  flat_param::FlatParameter& operator*() const { return *parameter; }

  // The memory that the shard rests in; null for its own.
  std::shared_ptr<RestingMemory> resting = nullptr;
  SharedFlat shared = {};
  std::unique_ptr<flat_param::FlatParameter> parameter;
  GradientBufferOptions gradients;
};

struct RuntimeUnit {
  std::string name;
  Placement placement;
  // One for each pair of dtypes, separately for parameters that are frozen when
  // the model is sharded; none for a root that owns nothing.
  std::vector<RuntimeFlat> flats;
};

struct RuntimeHooks {
  ReduceScatterHook reduce_scatter;  // unset: the communicator's
  AllReduceHook all_reduce;          // unset: the communicator's
  // Called at kStep, when all gradients of the unit's shards are there.
  std::function<absl::Status(int unit)> step;
};

// Owns the units and, with them, the flat parameters, but no stream and no
// memory of a step. It must outlive the parts. Not thread-safe.
class RuntimeCommon {
 public:
  using Group = std::shared_ptr<comm::Communicator>;

  // `communicator` is the group of all ranks. `timeout` limits each wait.
  RuntimeCommon(Group communicator, std::vector<RuntimeUnit> units,
                absl::Duration timeout);
  RuntimeCommon(const RuntimeCommon&) = delete;
  RuntimeCommon& operator=(const RuntimeCommon&) = delete;

  const std::vector<RuntimeUnit>& units() const { return units_; }
  int num_units() const { return static_cast<int>(units_.size()); }
  const std::string& name(int unit) const { return units_[unit].name; }
  const Placement& placement(int unit) const { return units_[unit].placement; }
  absl::Span<const RuntimeFlat> flats(int unit) const {
    return units_[unit].flats;
  }
  // Names flat parameter `i` in collectives: the unit, and which of its flat
  // parameters if it has several. Lives as long as this object.
  const std::string& label(int unit, size_t i) const {
    return labels_[unit][i];
  }

  comm::Communicator& communicator() const { return *communicator_; }
  absl::Duration timeout() const { return timeout_; }
  absl::Time Deadline() const { return absl::Now() + timeout_; }
  // Shards and all that is gathered lie here.
  c10::Device device() const { return device_; }

  // The collectives since it was cleared, without gathers within the smaller
  // group, which its ranks make together.
  OrderLog& order() { return order_; }

  // Makes what is computed later wait for `work`; the host waits if there is no
  // device that can.
  absl::Status Await(comm::Work& work) const;
  // Drops `work`, which may be null. The host does not wait, but a device's
  // later work does.
  void Forget(std::unique_ptr<comm::Work>& work) const;

  // Returns an allocator of memory for collectives of the group that `group_of`
  // returns for each unit.
  BufferPool::Allocate AllocateBy(
      const Group& (*group_of)(const Placement&)) const;

 private:
  const Group communicator_;
  const std::vector<RuntimeUnit> units_;
  const std::vector<std::vector<std::string>> labels_;  // per unit
  const absl::Duration timeout_;
  const c10::Device device_;
  OrderLog order_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_COMMON_H_
