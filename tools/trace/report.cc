#include "tools/trace/report.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "fsdp/trace/trace_buffer.h"

namespace fsdp::trace_report {
namespace {

// Says whether a moment may belong to a span, and which open span it belongs
// to: one of kOwn before one of kAround.
enum class Claim { kNone, kAround, kOwn };

Claim ClaimOf(TraceCategory category) {
  switch (category) {
    case TraceCategory::kForward:
    case TraceCategory::kRecompute:
    case TraceCategory::kBackward:
    case TraceCategory::kGatherWait:
    case TraceCategory::kReduceWait:
    case TraceCategory::kFence:
    case TraceCategory::kAgreement:
    case TraceCategory::kCopy:
    case TraceCategory::kStart:
    case TraceCategory::kFree:
    case TraceCategory::kOptimizer:
      return Claim::kOwn;
    case TraceCategory::kBookkeeping:
    case TraceCategory::kUser:
      return Claim::kAround;
    case TraceCategory::kPhase:
    case TraceCategory::kStep:
    case TraceCategory::kGathering:
    case TraceCategory::kReducing:
      return Claim::kNone;
  }
  return Claim::kNone;
}

}  // namespace

std::vector<Slice> SlicesOf(const RankTrace& trace, double begin, double end) {
  struct Edge {
    double time;
    bool begins;
    std::pair<Claim, size_t> span;  // a moment belongs to the greatest open one
  };
  std::vector<Edge> edges;
  for (size_t i = 0; i < trace.spans.size(); ++i) {
    const Span& span = trace.spans[i];
    const Claim claim = ClaimOf(span.category);
    if (claim == Claim::kNone || span.end <= begin || span.begin >= end) {
      continue;
    }
    edges.push_back({std::max(span.begin, begin), true, {claim, i}});
    edges.push_back({std::min(span.end, end), false, {claim, i}});
  }
  std::sort(edges.begin(), edges.end(),
            [](const Edge& a, const Edge& b) { return a.time < b.time; });
  std::vector<Slice> slices;
  std::set<std::pair<Claim, size_t>> open;
  double now = begin;
  // Appends a slice until then, or extends the last one that it continues.
  const auto append = [&](double until) {
    if (!(until > now)) return;
    Slice slice = {now, until, std::string(kOther), "", ""};
    if (!open.empty()) {
      const Span& span = trace.spans[open.rbegin()->second];
      slice.what = span.category == TraceCategory::kUser ? span.name
                                                         : Name(span.category);
      slice.unit = span.unit;
      slice.name = span.name;
    }
    if (!slices.empty() && slices.back().end == now &&
        slices.back().what == slice.what && slices.back().name == slice.name) {
      slices.back().end = until;
    } else {
      slices.push_back(std::move(slice));
    }
  };
  for (const Edge& edge : edges) {
    append(edge.time);
    now = edge.time;
    if (edge.begins) {
      open.insert(edge.span);
    } else {
      open.erase(edge.span);
    }
  }
  append(end);
  return slices;
}

double StepTimes::Of(absl::string_view what) const {
  const auto found = times.find(std::string(what));
  return found == times.end() ? 0 : found->second;
}

double StepTimes::exposed() const {
  return Of(Name(TraceCategory::kGatherWait)) +
         Of(Name(TraceCategory::kReduceWait)) +
         Of(Name(TraceCategory::kFence)) + Of(Name(TraceCategory::kAgreement));
}

double StepTimes::compute() const {
  return Of(Name(TraceCategory::kForward)) +
         Of(Name(TraceCategory::kRecompute)) +
         Of(Name(TraceCategory::kBackward));
}

std::vector<StepTimes> BreakDown(absl::Span<const RankTrace> traces) {
  std::vector<StepTimes> steps;
  for (const RankTrace& trace : traces) {
    for (const Span& span : trace.spans) {
      if (span.category != TraceCategory::kStep) continue;
      StepTimes& step = steps.emplace_back();
      step.rank = trace.rank;
      step.step = span.step;
      step.begin = span.begin;
      step.end = span.end;
      for (const Slice& slice : SlicesOf(trace, span.begin, span.end)) {
        step.times[slice.what] += slice.end - slice.begin;
        if (slice.unit.empty()) continue;
        step.units[slice.unit][slice.what] += slice.end - slice.begin;
      }
      for (const Span& other : trace.spans) {
        if (other.category != TraceCategory::kGathering) continue;
        if (other.begin < span.begin || other.begin >= span.end) continue;
        step.bytes_gathered[other.unit] += other.bytes;
      }
    }
  }
  return steps;
}

std::vector<std::string> KindsOf(absl::Span<const StepTimes> steps) {
  std::set<std::string> seen;
  for (const StepTimes& step : steps) {
    for (const auto& [what, seconds] : step.times) seen.insert(what);
  }
  std::vector<std::string> kinds;
  const auto take = [&](absl::string_view name) {
    if (seen.erase(std::string(name)) > 0) kinds.emplace_back(name);
  };
  const bool has_other = seen.erase(std::string(kOther)) > 0;
  for (int i = 0; i < kNumTraceCategories; ++i) {
    take(Name(static_cast<TraceCategory>(i)));
  }
  kinds.insert(kinds.end(), seen.begin(), seen.end());
  if (has_other) kinds.emplace_back(kOther);
  return kinds;
}

namespace {

std::string Ms(double seconds) {
  return absl::StrFormat("%.2f", seconds * 1e3);
}

// Makes columns as wide as needed: the first to the left, numbers to the right.
class Table {
 public:
  void AddRow(std::vector<std::string> cells) {
    widths_.resize(std::max(widths_.size(), cells.size()));
    for (size_t i = 0; i < cells.size(); ++i) {
      widths_[i] = std::max(widths_[i], cells[i].size());
    }
    rows_.push_back(std::move(cells));
  }

  std::string ToString() const {
    std::string text;
    for (const std::vector<std::string>& row : rows_) {
      for (size_t i = 0; i < row.size(); ++i) {
        const std::string space(widths_[i] - row[i].size(), ' ');
        absl::StrAppend(&text, i == 0 ? "" : "  ", i == 0 ? "" : space, row[i],
                        i == 0 && row.size() > 1 ? space : "");
      }
      text += '\n';
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<size_t> widths_;
};

using Steps = std::vector<const StepTimes*>;

template <typename Value>
double Mean(const Steps& steps, const Value& value_of) {
  double sum = 0;
  for (const StepTimes* step : steps) sum += value_of(*step);
  return sum / static_cast<double>(steps.size());
}

double MeanOf(const Steps& steps, const std::string& kind) {
  return Mean(steps, [&](const StepTimes& step) { return step.Of(kind); });
}

double Seconds(const StepTimes& step) { return step.seconds(); }
double Compute(const StepTimes& step) { return step.compute(); }

// Returns 0 for what is not there.
template <typename Map>
auto ValueOf(const Map& map, const std::string& key) {
  const auto found = map.find(key);
  return found == map.end() ? typename Map::mapped_type{} : found->second;
}

class Report {
 public:
  Report(absl::Span<const RankTrace> traces, absl::Span<const StepTimes> steps)
      : traces_(traces), kinds_(KindsOf(steps)) {
    std::map<std::pair<int, int64_t>, int> times_seen;
    for (const StepTimes& step : steps) {
      all_.push_back(&step);
      by_rank_[step.rank].push_back(&step);
      const int nth = times_seen[{step.rank, step.step}]++;
      by_step_[{nth, step.step}].push_back(&step);
    }
  }

  std::string ToString() {
    absl::StrAppendFormat(&text_, "%d step%s of %d rank%s\n", by_step_.size(),
                          by_step_.size() == 1 ? "" : "s", by_rank_.size(),
                          by_rank_.size() == 1 ? "" : "s");
    for (const RankTrace& trace : traces_) {
      if (trace.num_dropped == 0) continue;
      absl::StrAppendFormat(
          &text_,
          "rank %d dropped its %d oldest spans: its first step may be "
          "incomplete (TraceOptions::capacity)\n",
          trace.rank, trace.num_dropped);
    }
    StepTable();
    Exposure();
    if (by_rank_.size() > 1) RankTable();
    UnitTable();
    return std::move(text_);
  }

 private:
  std::vector<std::string> Header(const std::string& first) const {
    std::vector<std::string> cells = {first, "time"};
    cells.insert(cells.end(), kinds_.begin(), kinds_.end());
    return cells;
  }

  std::vector<std::string> Row(std::string first, const Steps& steps) const {
    std::vector<std::string> cells = {std::move(first),
                                      Ms(Mean(steps, Seconds))};
    for (const std::string& kind : kinds_) {
      cells.push_back(Ms(MeanOf(steps, kind)));
    }
    return cells;
  }

  void StepTable() {
    text_ += "\nSteps, in ms, mean of the ranks\n";
    Table table;
    table.AddRow(Header("step"));
    for (const auto& [key, steps] : by_step_) {
      table.AddRow(Row(absl::StrCat(key.second), steps));
    }
    if (by_step_.size() > 1) table.AddRow(Row("mean", all_));
    text_ += table.ToString();
  }

  void Exposure() {
    const double step = Mean(all_, Seconds);
    const double exposed =
        Mean(all_, [](const StepTimes& each) { return each.exposed(); });
    absl::StrAppendFormat(&text_,
                          "\nExposed communication: %s ms a step, %.1f %% of "
                          "it",
                          Ms(exposed), step > 0 ? 100 * exposed / step : 0);
    std::string parts;
    for (const TraceCategory category :
         {TraceCategory::kGatherWait, TraceCategory::kReduceWait,
          TraceCategory::kFence, TraceCategory::kAgreement}) {
      const double seconds = MeanOf(all_, Name(category));
      if (seconds == 0) continue;
      absl::StrAppend(&parts, parts.empty() ? "" : ", ", Name(category), " ",
                      Ms(seconds));
    }
    absl::StrAppend(&text_, parts.empty() ? "" : absl::StrCat(": ", parts));
    const double starts = MeanOf(all_, Name(TraceCategory::kStart));
    if (starts > 0) {
      absl::StrAppend(&text_, "; to start collectives takes ", Ms(starts),
                      " more");
    }
    text_ += '\n';
  }

  void RankTable() {
    text_ += "\nRanks, in ms a step\n";
    Table table;
    table.AddRow(Header("rank"));
    double slowest = -1;
    int slowest_rank = 0;
    for (const auto& [rank, steps] : by_rank_) {
      table.AddRow(Row(absl::StrCat(rank), steps));
      const double compute = Mean(steps, Compute);
      if (compute <= slowest) continue;
      slowest = compute;
      slowest_rank = rank;
    }
    double skew = 0;
    for (const auto& [key, steps] : by_step_) {
      const auto [first, last] =
          std::minmax_element(steps.begin(), steps.end(),
                              [](const StepTimes* a, const StepTimes* b) {
                                return a->begin < b->begin;
                              });
      skew = std::max(skew, (*last)->begin - (*first)->begin);
    }
    const double mean = Mean(all_, Compute);
    absl::StrAppendFormat(
        &text_,
        "%srank %d computes longest, %.1f %% above the mean; ranks begin a "
        "step up to %s ms apart\n",
        table.ToString(), slowest_rank,
        mean > 0 ? 100 * (slowest / mean - 1) : 0, Ms(skew));
  }

  void UnitTable() {
    std::set<std::string> kinds_of_units;
    std::vector<std::string> units;  // in the order of their first step
    for (const StepTimes* step : all_) {
      for (const auto& [unit, times] : step->units) {
        if (std::find(units.begin(), units.end(), unit) == units.end()) {
          units.push_back(unit);
        }
        for (const auto& [kind, seconds] : times) kinds_of_units.insert(kind);
      }
    }
    if (units.empty()) return;
    text_ += "\nUnits, in ms a step, mean of the ranks\n";
    Table table;
    std::vector<std::string> header = {"unit"};
    for (const std::string& kind : kinds_) {
      if (kinds_of_units.count(kind) > 0) header.push_back(kind);
    }
    header.push_back("gathered MB");
    table.AddRow(header);
    for (const std::string& unit : units) {
      std::vector<std::string> cells = {unit};
      for (size_t i = 1; i + 1 < header.size(); ++i) {
        cells.push_back(Ms(Mean(all_, [&](const StepTimes& step) {
          return ValueOf(ValueOf(step.units, unit), header[i]);
        })));
      }
      const double gathered = Mean(all_, [&](const StepTimes& step) {
        return static_cast<double>(ValueOf(step.bytes_gathered, unit));
      });
      cells.push_back(absl::StrFormat("%.2f", gathered / 1e6));
      table.AddRow(std::move(cells));
    }
    text_ += table.ToString();
  }

  const absl::Span<const RankTrace> traces_;
  const std::vector<std::string> kinds_;
  Steps all_;
  std::map<int, Steps> by_rank_;
  // The key is how often the step's number was there before, and the number.
  std::map<std::pair<int, int64_t>, Steps> by_step_;
  std::string text_;
};

std::string CsvField(absl::string_view text) {
  if (!absl::StrContains(text, ',') && !absl::StrContains(text, '"') &&
      !absl::StrContains(text, '\n')) {
    return std::string(text);
  }
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

}  // namespace

std::string ToText(absl::Span<const RankTrace> traces,
                   absl::Span<const StepTimes> steps) {
  return Report(traces, steps).ToString();
}

std::string ToCsv(absl::Span<const StepTimes> steps) {
  std::string text = "step,rank,unit,kind,ms\n";
  for (const StepTimes& step : steps) {
    const auto line = [&](absl::string_view unit, absl::string_view kind,
                          double seconds) {
      absl::StrAppendFormat(&text, "%d,%d,%s,%s,%.6f\n", step.step, step.rank,
                            CsvField(unit), CsvField(kind), seconds * 1e3);
    };
    line("", "step", step.seconds());
    for (const auto& [kind, seconds] : step.times) line("", kind, seconds);
    for (const auto& [unit, times] : step.units) {
      for (const auto& [kind, seconds] : times) line(unit, kind, seconds);
    }
  }
  return text;
}

}  // namespace fsdp::trace_report
