// What steps have done with which memory, so that it can be told whether they
// are alike: a captured step is replayed in place of all that follow.
#ifndef FSDP_RUNTIME_STEP_LOG_H_
#define FSDP_RUNTIME_STEP_LOG_H_

#include <functional>
#include <string>
#include <vector>

#include "fsdp/schedule/schedule.h"

namespace fsdp {

// An action of the schedule that was carried out.
struct StepRecord {
  Action action;
  // Of each flat parameter of the unit, afterwards; null for none.
  std::vector<const void*> gathered = {};
  std::vector<const void*> reduced = {};
  // The host has read from the device which parameters other ranks have used.
  bool read_flags = false;
};
using StepLog = std::vector<StepRecord>;

// Empty where both are alike and can be captured. Otherwise the first
// difference from `before` to `after`, the step behind it, by the names of
// units: "WaitGather of blocks.1: what is gathered lies elsewhere than in the
// step before".
std::string DifferenceOf(const StepLog& before, const StepLog& after,
                         const std::function<std::string(int unit)>& name);

}  // namespace fsdp

#endif  // FSDP_RUNTIME_STEP_LOG_H_
