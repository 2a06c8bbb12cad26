// Units and hooks for a Runtime, the groups and waits that its parts share, and
// logs: of what steps have done with which memory, to tell whether they are
// alike (a captured step stands for all that follow), and of collectives.
#ifndef FSDP_RUNTIME_RUNTIME_COMMON_H_
#define FSDP_RUNTIME_RUNTIME_COMMON_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
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
#include "fsdp/schedule/schedule.h"

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

// A flat parameter, to which it points, and what becomes of its gradients.
struct RuntimeFlat {
  flat_param::FlatParameter* operator->() const { return parameter.get(); }
  flat_param::FlatParameter& operator*() const { return *parameter; }

  // The memory that the shard rests in; null for its own.
  std::shared_ptr<RestingMemory> resting = nullptr;
  // Memory of the compute dtype that the ranks of the unit's group share: all
  // compute with this copy, and shards of that dtype rest in it, side by side.
  // Undefined: there is none.
  at::Tensor shared = {};
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

// An action of the schedule that was carried out.
struct StepRecord {
  Action action;
  // Addresses for each flat parameter of the unit, afterwards; null for none.
  std::vector<const void*> gathered = {};
  std::vector<const void*> reduced = {};
  // The host has read from the device which parameters other ranks have used.
  bool read_flags = false;
};
using StepLog = std::vector<StepRecord>;

// Returns "" if both steps are alike and can be captured. Otherwise returns the
// first difference between `before` and the step after it, with names of units:
// "WaitGather of blocks.1: what is gathered lies elsewhere than in the step
// before".
std::string DifferenceOf(const StepLog& before, const StepLog& after,
                         const std::function<std::string(int unit)>& name);

// Keeps which collectives a rank has started, in order, for comparison between
// ranks.
class OrderLog {
 public:
  // `kind` is kGather, kReduce or kReplicate. `label` must outlive this object.
  void Add(ActionKind kind, int unit, const std::string& label, int64_t bytes,
           c10::ScalarType dtype);
  void Clear();

  // Covers all collectives since Clear(). Equal orders have equal hashes on all
  // ranks.
  uint64_t hash() const { return hash_; }
  // Returns a line with label, bytes and dtype for each; if there are very
  // many, as when only forwards run, for the first ones.
  std::string ToString() const;

 private:
  static constexpr size_t kKept = 10'000;
  static constexpr uint64_t kNothing = 0xcbf29ce484222325;

  struct Entry {
    ActionKind kind;
    const std::string* label;
    int64_t bytes;
    c10::ScalarType dtype;
  };

  uint64_t hash_ = kNothing;  // FNV-1a over words
  uint64_t count_ = 0;
  std::vector<Entry> first_;
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
  std::vector<std::vector<std::string>> labels_;  // per unit
  const absl::Duration timeout_;
  const c10::Device device_;
  OrderLog order_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_COMMON_H_
