// Steps of units within a backward.
#ifndef FSDP_RUNTIME_UNIT_STEPS_H_
#define FSDP_RUNTIME_UNIT_STEPS_H_

#include <functional>
#include <set>

#include "absl/status/status.h"
#include "fsdp/runtime/runtime_common.h"

namespace fsdp {

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

#endif  // FSDP_RUNTIME_UNIT_STEPS_H_
