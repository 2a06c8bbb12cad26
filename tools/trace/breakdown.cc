#include "tools/trace/breakdown.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

std::string WhatOf(const Span& span) {
  return span.category == TraceCategory::kUser ? span.name
                                               : Name(span.category);
}

struct Edge {
  double time;
  bool begins;
  std::pair<Claim, size_t> span;  // the moment belongs to the greatest open one
};

std::vector<Edge> EdgesOf(const RankTrace& trace, double begin, double end) {
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
  return edges;
}

// Appends a slice, or extends the last one that it continues.
void Append(const RankTrace& trace, double begin, double end,
            const std::set<std::pair<Claim, size_t>>& open,
            std::vector<Slice>& slices) {
  if (!(end > begin)) return;
  Slice slice = {begin, end, std::string(kOther), "", ""};
  if (!open.empty()) {
    const Span& span = trace.spans[open.rbegin()->second];
    slice.what = WhatOf(span);
    slice.unit = span.unit;
    slice.name = span.name;
  }
  if (!slices.empty() && slices.back().end == begin &&
      slices.back().what == slice.what && slices.back().name == slice.name) {
    slices.back().end = end;
  } else {
    slices.push_back(std::move(slice));
  }
}

}  // namespace

std::vector<Slice> SlicesOf(const RankTrace& trace, double begin, double end) {
  std::vector<Slice> slices;
  std::set<std::pair<Claim, size_t>> open;
  double now = begin;
  for (const Edge& edge : EdgesOf(trace, begin, end)) {
    Append(trace, now, edge.time, open, slices);
    now = edge.time;
    if (edge.begins) {
      open.insert(edge.span);
    } else {
      open.erase(edge.span);
    }
  }
  Append(trace, now, end, open, slices);
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

}  // namespace fsdp::trace_report
