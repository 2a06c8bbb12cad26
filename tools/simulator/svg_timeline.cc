#include "tools/simulator/svg_timeline.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "fsdp/simulator/timeline.h"
#include "tools/drawing/lane_chart.h"

namespace fsdp::simulator {
namespace {

using drawing::LaneChart;

struct KnownStyle {
  SpanKind kind;
  int lane;
  const char* fill;
  const char* text;  // null: hatched
};

const KnownStyle kStyles[] = {
    {SpanKind::kForward, 0, "#4e79a7", "#fff"},
    {SpanKind::kBackward, 0, "#254e77", "#fff"},
    {SpanKind::kWait, 0, "#d62728", nullptr},
    {SpanKind::kCopy, 1, "#8f8881", "#fff"},
    {SpanKind::kOptimizer, 1, "#8464a8", "#fff"},
    {SpanKind::kGather, 2, "#59a14f", "#fff"},
    {SpanKind::kReduce, 3, "#f0923a", "#222"},
    {SpanKind::kReplicate, 3, "#b07408", "#fff"},
};
const char* const kLaneNames[] = {"compute", "memory", "gathers", "reductions"};

std::string Ms(double seconds) {
  return absl::StrFormat("%.5g ms", seconds * 1e3);
}

LaneChart::Bar BarOf(const Span& span, const ModelShape& model) {
  LaneChart::Bar bar;
  while (kStyles[bar.style].kind != span.kind) ++bar.style;
  bar.lane = kStyles[bar.style].lane;
  bar.begin = span.begin;
  bar.end = span.end;
  bar.label = model.units[span.unit].name;
  bar.title = absl::StrCat(Name(span.kind), " of ", bar.label);
  return bar;
}

}  // namespace

std::string DrawTimeline(const ModelShape& model, const StepResult& step,
                         absl::string_view title) {
  LaneChart chart;
  chart.title = std::string(title);
  const Spent& total = step.total;
  chart.subtitle = absl::StrFormat(
      "step %s: compute %s, copies %s, optimizer %s, exposed gathers %s, "
      "exposed reductions %s",
      Ms(step.seconds), Ms(total.compute), Ms(total.copies),
      Ms(total.optimizer), Ms(total.exposed_gather), Ms(total.exposed_reduce));
  chart.end = step.seconds;
  for (const KnownStyle& known : kStyles) {
    const bool hatched = known.text == nullptr;
    chart.styles.push_back(
        {Name(known.kind), known.fill, hatched ? "" : known.text, hatched});
  }
  for (const char* name : kLaneNames) chart.lanes.push_back({"", name});
  for (const Span& span : step.timeline) {
    chart.bars.push_back(BarOf(span, model));
  }
  return drawing::ToSvg(chart);
}

}  // namespace fsdp::simulator
