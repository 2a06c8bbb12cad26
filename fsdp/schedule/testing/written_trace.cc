#include "fsdp/schedule/testing/written_trace.h"

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/memory_model.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

// Returns the name in "Name(2)", and sets `unit`, or 0 if none is given.
std::string NameOf(absl::string_view call, int& unit) {
  const std::vector<std::string> parts = absl::StrSplit(call, '(');
  unit = 0;
  if (parts.size() > 1) {
    EXPECT_TRUE(absl::SimpleAtoi(absl::StripSuffix(parts[1], ")"), &unit));
  }
  return parts[0];
}

template <typename Kind>
Kind KindOf(absl::string_view name, Kind last) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    if (name == Name(static_cast<Kind>(i))) return static_cast<Kind>(i);
  }
  ADD_FAILURE() << "there is no " << name;
  return last;
}

// Reads an event such as "Unsync PostBackward(1)"; Recompute and Frozen are
// prefixes, too.
Event EventOf(absl::string_view text) {
  Event event{EventKind::kReset};
  event.reduces = !absl::ConsumePrefix(&text, "Frozen ");
  event.recomputes = absl::ConsumePrefix(&text, "Recompute ");
  event.synchronizes = !absl::ConsumePrefix(&text, "Unsync ");
  const std::string name = NameOf(text, event.unit);
  event.kind = KindOf(name, EventKind::kRelease);
  event.records_graph = true;
  event.expects_backward = true;
  return event;
}

Actions ActionsIn(absl::string_view text) {
  Actions actions;
  for (absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    int unit = 0;
    const std::string name = NameOf(word, unit);
    actions.push_back({KindOf(name, ActionKind::kCloseShards), unit});
  }
  return actions;
}

}  // namespace

std::string Violation(const Setting& setting, absl::string_view trace) {
  MemoryModel model(setting.units, setting.options, setting.sharing);
  for (absl::string_view line :
       absl::StrSplit(trace, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> halves = absl::StrSplit(line, ": ");
    const absl::string_view what = absl::StripSuffix(halves[0], ":");
    int unit = 0;
    const std::string name = NameOf(what, unit);
    if (name == "Write") {
      EXPECT_TRUE(model.MayWrite()) << trace;
      model.Write();
    } else if (name == "Look") {
      EXPECT_TRUE(model.MayLook(unit)) << trace;
      model.Look(unit);
    } else if (name == "Drop") {
      model.DropGradients();
    } else {
      model.Happens(EventOf(what),
                    halves.size() > 1 ? ActionsIn(halves[1]) : Actions());
    }
    if (!model.violation().empty()) break;
  }
  return model.violation();
}

Setting Private(int layers) { return {Layers(layers), {}}; }

Setting Shared(int layers, Sharing sharing) {
  Setting setting{Layers(layers), {}, sharing};
  for (ScheduledUnit& unit : setting.units) unit.shares_memory = true;
  return setting;
}

std::string With(std::string trace, absl::string_view from,
                 absl::string_view to, absl::string_view after) {
  const size_t at = trace.find(from, trace.find(after));
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? trace : trace.replace(at, from.size(), to);
}

const char kStep[] = R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0):
PreBackward(0): Gather(1)
PreBackward(1): WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
Write
Drop
)";

}  // namespace fsdp::testing
