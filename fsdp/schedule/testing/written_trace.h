// Traces as people write them, in the form of golden ones, for a MemoryModel.
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

// A root and `layers` units in it, in memory of their own or in common memory.
Setting Private(int layers);
Setting Shared(int layers, Sharing sharing = Sharing::kInPlace);

// What a model sees in `trace`. Between events, "Write", "Look(1)" and "Drop"
// are what the user does; "Unsync", "Recompute" and "Frozen" before an event
// say what it is, else it synchronizes, is no recomputation and reduces.
std::string Violation(const Setting& setting, absl::string_view trace);

// `trace`, with `from` replaced by `to` where it comes first after `after`.
std::string With(std::string trace, absl::string_view from,
                 absl::string_view to, absl::string_view after = "");

// A forward and a backward of two private units, and what a user does then.
extern const char kStep[];

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_WRITTEN_TRACE_H_
