#include "tools/trace/picture.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "fsdp/trace/trace_buffer.h"

namespace fsdp::trace_report {
namespace {

using drawing::LaneChart;

constexpr size_t kMostRanks = 4;  // unless somebody names them

enum Lane { kComputeLane, kMemoryLane, kGatherLane, kReduceLane, kNumLanes };
const char* const kLaneNames[] = {"compute", "the rest", "gathers",
                                  "reductions"};

struct KnownStyle {
  TraceCategory category;
  Lane lane;
  LaneChart::Style style;
};

const std::vector<KnownStyle>& KnownStyles() {
  using C = TraceCategory;
  static const auto* const kStyles = new std::vector<KnownStyle>{
      {C::kForward, kComputeLane, {"forward", "#4e79a7", "#fff"}},
      {C::kRecompute, kComputeLane, {"recompute", "#7fb6b9", "#fff"}},
      {C::kBackward, kComputeLane, {"backward", "#254e77", "#fff"}},
      {C::kGatherWait, kComputeLane, {"wait for gather", "#2f9e44", "", true}},
      {C::kReduceWait,
       kComputeLane,
       {"wait for reduction", "#e8700a", "", true}},
      {C::kFence, kComputeLane, {"fence", "#d6281f", "", true}},
      {C::kAgreement, kComputeLane, {"agreement", "#a01a7d", "", true}},
      {C::kCopy, kMemoryLane, {"copy", "#8f8881", "#fff"}},
      {C::kStart, kMemoryLane, {"start", "#c9a227", "#222"}},
      {C::kFree, kMemoryLane, {"free", "#c4bdb6", "#222"}},
      {C::kOptimizer, kMemoryLane, {"optimizer", "#8464a8", "#fff"}},
      {C::kBookkeeping, kMemoryLane, {"bookkeeping", "#4a4a4a", "#fff"}},
      {C::kGathering, kGatherLane, {"gather in flight", "#8fce8a", "#222"}},
      {C::kReducing, kReduceLane, {"reduction in flight", "#f5b87a", "#222"}},
  };
  return *kStyles;
}

// Of the user's spans, in the order of their names.
const char* const kUserColours[] = {"#1b9aaa", "#c2577b", "#6b8e23", "#b5651d"};

class Picture {
 public:
  Picture(absl::Span<const RankTrace> traces, std::vector<StepTimes> steps)
      : traces_(traces), steps_(std::move(steps)) {}

  LaneChart Draw(int num_left_out) {
    chart_.begin = steps_.front().begin;
    chart_.end = steps_.front().end;
    double exposed = 0;
    double seconds = 0;
    for (const StepTimes& step : steps_) {
      chart_.begin = std::min(chart_.begin, step.begin);
      chart_.end = std::max(chart_.end, step.end);
      exposed += step.exposed();
      seconds += step.seconds();
    }
    const auto num_steps = static_cast<double>(steps_.size());
    chart_.title = absl::StrCat("Step ", steps_.front().step);
    chart_.subtitle = absl::StrFormat(
        "%.2f ms, of it exposed communication %.2f ms (%.1f %%)%s",
        seconds / num_steps * 1e3, exposed / num_steps * 1e3,
        seconds > 0 ? 100 * exposed / seconds : 0.0,
        num_left_out == 0
            ? ""
            : absl::StrCat("; ", num_left_out, " more ranks are not drawn"));
    for (const KnownStyle& known : KnownStyles()) {
      styles_[Name(known.category)] = {known.lane,
                                       static_cast<int>(chart_.styles.size())};
      chart_.styles.push_back(known.style);
    }
    for (const StepTimes& step : steps_) DrawRank(step);
    return std::move(chart_);
  }

 private:
  struct Place {
    Lane lane;
    int style;
  };

  Place PlaceOf(const std::string& what) {
    const auto found = styles_.find(what);
    if (found != styles_.end()) return found->second;
    const size_t count = chart_.styles.size() - KnownStyles().size();
    const Place place = {kMemoryLane, static_cast<int>(chart_.styles.size())};
    chart_.styles.push_back(
        {what, kUserColours[count % std::size(kUserColours)], "#fff"});
    styles_[what] = place;
    return place;
  }

  void DrawRank(const StepTimes& step) {
    const RankTrace& trace =
        *std::find_if(traces_.begin(), traces_.end(),
                      [&](const RankTrace& t) { return t.rank == step.rank; });
    const int first_lane = static_cast<int>(chart_.lanes.size());
    for (const char* name : kLaneNames) {
      chart_.lanes.push_back({absl::StrCat("rank ", step.rank), name});
    }
    for (const Slice& slice : SlicesOf(trace, step.begin, step.end)) {
      if (slice.what == kOther) continue;
      const Place place = PlaceOf(slice.what);
      LaneChart::Bar bar;
      bar.lane = first_lane + place.lane;
      bar.style = place.style;
      bar.begin = slice.begin;
      bar.end = slice.end;
      bar.label = slice.unit.empty() ? slice.name : slice.unit;
      bar.title = slice.name;
      chart_.bars.push_back(std::move(bar));
    }
    DrawInFlight(trace, step, TraceCategory::kGathering, first_lane);
    DrawInFlight(trace, step, TraceCategory::kReducing, first_lane);
  }

  // Those at the same time share the lane's height.
  void DrawInFlight(const RankTrace& trace, const StepTimes& step,
                    TraceCategory category, int first_lane) {
    const Place place = PlaceOf(Name(category));
    std::vector<double> busy_until;  // by part of the height
    const size_t first_bar = chart_.bars.size();
    for (const Span& span : trace.spans) {
      if (span.category != category || span.begin < step.begin ||
          span.begin >= step.end) {
        continue;
      }
      size_t part = 0;
      while (part < busy_until.size() && busy_until[part] > span.begin) ++part;
      if (part == busy_until.size()) busy_until.push_back(0);
      busy_until[part] = span.end;
      LaneChart::Bar bar;
      bar.lane = first_lane + place.lane;
      bar.style = place.style;
      bar.begin = span.begin;
      bar.end = std::min(span.end, step.end);
      bar.label = span.unit;
      bar.title = absl::StrFormat("%s, %.2f MB", span.name,
                                  1e-6 * static_cast<double>(span.bytes));
      bar.part = static_cast<int>(part);
      chart_.bars.push_back(std::move(bar));
    }
    for (size_t i = first_bar; i < chart_.bars.size(); ++i) {
      chart_.bars[i].parts = static_cast<int>(busy_until.size());
    }
  }

  const absl::Span<const RankTrace> traces_;
  const std::vector<StepTimes> steps_;  // one of each rank that is drawn
  std::map<std::string, Place> styles_;
  LaneChart chart_;
};

// The last step that as many ranks have as any.
int64_t LastCommonStep(absl::Span<const StepTimes> steps) {
  std::map<int64_t, int> counts;
  for (const StepTimes& step : steps) ++counts[step.step];
  int64_t best = counts.begin()->first;
  for (const auto& [step, count] : counts) {
    if (count >= counts[best]) best = step;
  }
  return best;
}

std::string RanksOf(absl::Span<const RankTrace> traces) {
  return absl::StrJoin(traces, ", ",
                       [](std::string* out, const RankTrace& trace) {
                         absl::StrAppend(out, trace.rank);
                       });
}

}  // namespace

absl::StatusOr<LaneChart> DrawStep(absl::Span<const RankTrace> traces,
                                   absl::Span<const StepTimes> steps,
                                   const PictureOptions& options) {
  std::vector<int> ranks = options.ranks;
  if (ranks.empty()) {
    for (const RankTrace& trace : traces) ranks.push_back(trace.rank);
    ranks.resize(std::min(ranks.size(), kMostRanks));
  }
  const int64_t number = options.step.value_or(LastCommonStep(steps));
  std::vector<StepTimes> drawn;
  for (const int rank : ranks) {
    const auto found =
        std::find_if(steps.begin(), steps.end(), [&](const StepTimes& step) {
          return step.rank == rank && step.step == number;
        });
    if (found == steps.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", number, " of rank ", rank,
                       " cannot be drawn: the trace has no such step. It has "
                       "ranks ",
                       RanksOf(traces), " and steps ", steps.front().step,
                       " to ", steps.back().step));
    }
    drawn.push_back(*found);
  }
  const int num_left_out = options.ranks.empty()
                               ? static_cast<int>(traces.size() - ranks.size())
                               : 0;
  return Picture(traces, std::move(drawn)).Draw(num_left_out);
}

}  // namespace fsdp::trace_report
