// Runs a MemoryModel on traces that people write in the form of golden ones.
#ifndef FSDP_SCHEDULE_TESTING_WRITTEN_TRACE_H_
#define FSDP_SCHEDULE_TESTING_WRITTEN_TRACE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/memory_model.h"

namespace fsdp::testing {

struct Setting {
  std::vector<ScheduledUnit> units;
  ScheduleOptions options;
  Sharing sharing = Sharing::kInPlace;
};

// These make a root and `layers` units in it, in private or in common memory.
Setting Private(int layers);
Setting Shared(int layers, Sharing sharing = Sharing::kInPlace);

// Returns the violation that a model finds in `trace`. Between events, "Write",
// "Look(1)" and "Drop" are acts of the user. "Unsync", "Recompute" and "Frozen"
// before an event describe it; without them it synchronizes, is no
// recomputation, and reduces.
std::string Violation(const Setting& setting, absl::string_view trace);

// Replaces the first `from` after `after` in `trace` by `to`.
std::string With(std::string trace, absl::string_view from,
                 absl::string_view to, absl::string_view after = "");

// A trace of a forward and a backward of two private units and of acts of the
// user.
extern const char kStep[];

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_WRITTEN_TRACE_H_
