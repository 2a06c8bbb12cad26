#include "fsdp/simulator/timeline.h"

#include <algorithm>

namespace fsdp::simulator {

const char* Name(SpanKind kind) {
  switch (kind) {
    case SpanKind::kForward:
      return "forward";
    case SpanKind::kBackward:
      return "backward";
    case SpanKind::kCopy:
      return "copy";
    case SpanKind::kOptimizer:
      return "optimizer";
    case SpanKind::kGather:
      return "all-gather";
    case SpanKind::kReduce:
      return "reduce-scatter";
    case SpanKind::kReplicate:
      return "all-reduce";
    case SpanKind::kWait:
      return "exposed wait";
  }
  return "?";
}

void Timeline::Compute(SpanKind kind, int unit, double seconds) {
  Add(kind, unit, now_, now_ + seconds);
  now_ += seconds;
}

double Timeline::Communicate(SpanKind kind, int unit, double seconds) {
  if (seconds == 0) return now_;
  const double begin = std::max(now_, network_free_);
  network_free_ = begin + seconds;
  Add(kind, unit, begin, network_free_);
  return network_free_;
}

double Timeline::Wait(int unit, double time) {
  const double begin = now_;
  now_ = std::max(now_, time);
  Add(SpanKind::kWait, unit, begin, now_);
  return now_ - begin;
}

void Timeline::Add(SpanKind kind, int unit, double begin, double end) {
  if (end > begin) spans_.push_back({kind, unit, begin, end});
}

}  // namespace fsdp::simulator
