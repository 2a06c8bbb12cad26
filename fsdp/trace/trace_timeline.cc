#include "fsdp/trace/trace_timeline.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/trace/collective_spans.h"
#include "fsdp/trace/compute_spans.h"
#include "fsdp/trace/unit_spans.h"

namespace fsdp {
namespace {

using Record = TraceBuffer::Record;
using Span = TraceTimeline::Span;

// Follows the scopes in the order in which they began and ended.
class Builder {
 public:
  explicit Builder(const TraceBuffer& buffer) : buffer_(buffer) {}

  TraceTimeline Build() {
    std::vector<Record> records = buffer_.Records();
    // A scope is around another when it began before and ended behind it.
    std::vector<size_t> order(records.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return records[a].sequence < records[b].sequence;
    });
    std::vector<size_t> open;
    for (const size_t i : order) {
      for (; !open.empty() && open.back() < i; open.pop_back()) {
        OnEnd(records[open.back()]);
      }
      OnBegin(records[i]);
      open.push_back(i);
    }
    for (; !open.empty(); open.pop_back()) OnEnd(records[open.back()]);
    return std::move(timeline_);
  }

 private:
  void OnBegin(const Record& record) {
    switch (record.scope.kind) {
      case TraceScope::Kind::kEvent:
        compute_.OnEventBegin(record);
        if (record.scope.event == EventKind::kReset) {
          collectives_.OnReset(record.begin_ns);
        }
        return unit_spans_.Add(TraceCategory::kBookkeeping,
                               Name(record.scope.event), record.name,
                               record.begin_ns, record.end_ns);
      case TraceScope::Kind::kAction:
        return collectives_.OnActionBegin(record);
      case TraceScope::Kind::kOrderCheck:
        return unit_spans_.Add(TraceCategory::kAgreement, "CheckOrder",
                               record.name, record.begin_ns, record.end_ns);
      case TraceScope::Kind::kUser:
        timeline_.spans.push_back({TraceCategory::kUser,
                                   buffer_.name(record.name), "",
                                   record.begin_ns, record.end_ns});
        return;
      case TraceScope::Kind::kStep:
        timeline_.spans.push_back(
            {TraceCategory::kStep, absl::StrCat("step ", record.scope.step), "",
             record.begin_ns, record.end_ns, 0, record.scope.step});
        return;
    }
  }

  void OnEnd(const Record& record) {
    if (record.scope.kind == TraceScope::Kind::kAction) {
      collectives_.OnActionEnd(record);
    } else if (record.scope.kind == TraceScope::Kind::kEvent) {
      compute_.OnEventEnd(record);
    }
  }

  const TraceBuffer& buffer_;
  TraceTimeline timeline_;
  UnitSpans unit_spans_{buffer_, &timeline_.spans};
  ComputeSpans compute_{&unit_spans_};
  CollectiveSpans collectives_{buffer_, &unit_spans_, &timeline_.memory};
};

// Drops what was before, but for the memory that there was by then.
void StartAt(int64_t first_ns, TraceTimeline& timeline) {
  std::vector<Span>& spans = timeline.spans;
  spans.erase(std::remove_if(spans.begin(), spans.end(),
                             [first_ns](const Span& span) {
                               return span.begin_ns < first_ns;
                             }),
              spans.end());
  std::vector<TraceTimeline::Memory>& memory = timeline.memory;
  auto kept = std::find_if(memory.begin(), memory.end(),
                           [first_ns](const TraceTimeline::Memory& sample) {
                             return sample.time_ns >= first_ns;
                           });
  if (kept != memory.begin()) {
    --kept;
    kept->time_ns = first_ns;
  }
  memory.erase(memory.begin(), kept);
}

// Outer spans before those inside them.
void Sort(std::vector<Span>& spans) {
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) {
                     if (a.begin_ns != b.begin_ns) {
                       return a.begin_ns < b.begin_ns;
                     }
                     return a.end_ns > b.end_ns;
                   });
}

void AssignLanes(TraceCategory category, std::vector<Span>& spans) {
  std::vector<int64_t> busy_until;
  for (Span& span : spans) {
    if (span.category != category) continue;
    size_t lane = 0;
    while (lane < busy_until.size() && busy_until[lane] > span.begin_ns) {
      ++lane;
    }
    if (lane == busy_until.size()) busy_until.push_back(0);
    busy_until[lane] = span.end_ns;
    span.lane = static_cast<int>(lane);
  }
}

}  // namespace

TraceTimeline MakeTimeline(const TraceBuffer& buffer, int64_t last_steps) {
  std::vector<int64_t> steps;  // when they began
  for (const Record& record : buffer.Records()) {
    if (record.scope.kind != TraceScope::Kind::kStep) continue;
    steps.push_back(record.begin_ns);
  }
  const int64_t count = static_cast<int64_t>(steps.size());
  const bool all = last_steps == 0 || count < last_steps;
  TraceTimeline timeline = Builder(buffer).Build();
  StartAt(all ? std::numeric_limits<int64_t>::min() : steps[count - last_steps],
          timeline);
  Sort(timeline.spans);
  AssignLanes(TraceCategory::kGathering, timeline.spans);
  AssignLanes(TraceCategory::kReducing, timeline.spans);
  return timeline;
}

}  // namespace fsdp
