// What one forward and backward of an unsharded model takes, module by module,
// and what becomes of that where the modules are units. Pure: no tensors.
#ifndef PLANNER_CHOOSE_STEP_PROFILE_H_
#define PLANNER_CHOOSE_STEP_PROFILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// What ran from the first operator that took a parameter of a module to the
// first that took another module's.
struct ModuleVisit {
  int module = 0;
  double seconds = 0;
  int64_t saved = 0;  // bytes that it leaves behind, for backward above all
  int64_t input = 0;  // of what its first operator took besides parameters
  // Alive at most beyond what the visits before it leave behind, and in its
  // backward beyond what it leaves behind itself; without the gradients of
  // parameters.
  int64_t working = 0;
  int64_t backward_working = 0;
};

struct StepProfile {
  std::vector<ModuleVisit> forward;  // in their order
  double backward_seconds = 0;

  double forward_seconds() const;
};

// Of `rows` rows, from what 1 and 2 take; where these go different ways, as
// many times what 2 take. Nothing becomes negative.
StepProfile Extrapolate(const StepProfile& one, const StepProfile& two,
                        int64_t rows);

// Numbers as text, for other ranks; exact. InvalidArgument: another text.
std::string ToText(const StepProfile& profile);
absl::StatusOr<StepProfile> ProfileFromText(absl::string_view text);

// A model's modules as units.
struct UnitMembership {
  std::vector<int> unit_of;      // by module: the innermost unit around it
  std::vector<int> parents;      // by unit; -1 for the root, unit 0
  std::vector<bool> recomputed;  // by unit, as a region around its forward
};

// Seconds of a unit itself, without the units inside.
struct UnitSeconds {
  double forward = 0;
  double backward = 0;      // recomputation included
  double share_before = 0;  // of forward, before the units inside
};

// By unit. Backward is shared out as forward is.
std::vector<UnitSeconds> ByUnit(const StepProfile& profile,
                                const UnitMembership& membership);

// Bytes of activations alive at most in a step, with the gradients that
// autograd holds until their units reduce them. Backward goes through the
// visits in reverse: frees what they have saved, and holds the gradients of
// their modules until all of their unit is done. A region keeps what it is
// called with and what it returns, and its forward runs again when backward
// comes to it. Units hold gradients at their borders. `gradients`: by module,
// of its parameters.
int64_t ActivationBytes(const StepProfile& profile,
                        const UnitMembership& membership,
                        const std::vector<int64_t>& gradients);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_STEP_PROFILE_H_
