// What the parts of a Runtime have in common: units, groups, how to wait for a
// collective, and the log of those that were started.
#ifndef FSDP_RUNTIME_RUNTIME_COMMON_H_
#define FSDP_RUNTIME_RUNTIME_COMMON_H_

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/runtime/step_log.h"

namespace fsdp {

// Owns the units and, with them, the flat parameters; no stream and no memory
// of a step. Outlives the parts. Not thread-safe.
class RuntimeCommon {
 public:
  using Group = std::shared_ptr<comm::Communicator>;

  // `communicator`: the group of all ranks. `timeout`: for each wait.
  RuntimeCommon(Group communicator, std::vector<RuntimeUnit> units,
                absl::Duration timeout);
  RuntimeCommon(const RuntimeCommon&) = delete;
  RuntimeCommon& operator=(const RuntimeCommon&) = delete;

  const std::vector<RuntimeUnit>& units() const { return units_; }
  int num_units() const { return static_cast<int>(units_.size()); }
  const std::string& name(int unit) const { return units_[unit].name; }
  const Placement& placement(int unit) const { return units_[unit].placement; }
  // Of flat parameter `i`, in collectives: the unit, and which of its flat
  // parameters where it has several. Lives as long as this object.
  const std::string& label(int unit, size_t i) const {
    return labels_[unit][i];
  }

  comm::Communicator& communicator() const { return *communicator_; }
  absl::Duration timeout() const { return timeout_; }
  absl::Time Deadline() const { return absl::Now() + timeout_; }
  // Of shards and all that is gathered.
  c10::Device device() const { return device_; }

  // The collectives since it was cleared.
  OrderLog& order() { return order_; }

  // Lets what is computed from now on wait for `work`: the host waits where a
  // device cannot.
  absl::Status Await(comm::Work& work) const;
  // Drops `work`, which may be null. The host does not wait; what a device is
  // given from now on does.
  void Forget(std::unique_ptr<comm::Work>& work) const;

  // Of memory for the collectives of the group that `group_of` tells of each
  // unit.
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

// Steps of units within a backward.

// Knows which units have gradients that are to be stepped; changes no gradient
// but as said below. Not thread-safe.
class UnitSteps {
 public:
  // `common` outlives this object.
  explicit UnitSteps(const RuntimeCommon& common) : common_(common) {}

  // From now on the unit's gradients, of which more may come, are to be
  // stepped.
  void Expect(int unit) { expected_.insert(unit); }
  // Calls `step` when no other unit that is to be stepped shows a gradient: an
  // optimizer over all shards would also step a unit used several times, of
  // whose gradient only a part has arrived yet. Returns what `step` does, or
  // what it throws.
  absl::Status Step(int unit,
                    const std::function<absl::Status(int unit)>& step);
  // After an error: no step is to come, and the gradients that wait for one are
  // dropped, since the next backward would add to them.
  void Drop();

 private:
  const RuntimeCommon& common_;
  std::set<int> expected_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_COMMON_H_
