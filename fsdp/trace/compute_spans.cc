#include "fsdp/trace/compute_spans.h"

#include <algorithm>
#include <cstddef>

#include "fsdp/schedule/schedule.h"

namespace fsdp {

using Record = TraceBuffer::Record;

void ComputeSpans::OnEventBegin(const Record& event) {
  if (events_open_++ == 0) StopComputing(event.begin_ns);
  BeginEvent(event);
}

void ComputeSpans::OnEventEnd(const Record& event) {
  if (!given_up_) EndEvent(event);
  if (--events_open_ > 0) return;
  given_up_ = false;
  computing_since_ = event.end_ns;
}

void ComputeSpans::StopComputing(int64_t now_ns) {
  if (!running_.empty() && now_ns > computing_since_) {
    const Running& innermost = running_.back();
    spans_->Add(innermost.category, Name(innermost.category), innermost.unit,
                computing_since_, now_ns);
  }
}

void ComputeSpans::BeginEvent(const Record& event) {
  switch (event.scope.event) {
    case EventKind::kPreForward:
      if (!backward_began_ && running_.empty()) {
        forward_began_ = event.begin_ns;
      }
      return;
    case EventKind::kPostForward:
      return Leave(event.name, /*in_backward=*/false);
    case EventKind::kPreBackward:
    case EventKind::kPostBackward:
      if (!backward_began_) backward_began_ = event.begin_ns;
      if (event.scope.event == EventKind::kPostBackward) {
        Leave(event.name, /*in_backward=*/true);
      }
      return;
    case EventKind::kReset:
      return GiveUp();
    default:
      return;
  }
}

void ComputeSpans::EndEvent(const Record& event) {
  switch (event.scope.event) {
    case EventKind::kPreForward:
      running_.push_back({event.name, backward_began_
                                          ? TraceCategory::kRecompute
                                          : TraceCategory::kForward});
      return;
    case EventKind::kPostForward:
      return EndForward(event);
    case EventKind::kPreBackward:
      running_.push_back({event.name, TraceCategory::kBackward});
      return;
    case EventKind::kEndOfBackward:
      return EndBackward(event);
    default:
      return;
  }
}

// Units that end in another order than they began in reverse are those of a
// graph that is no chain.
void ComputeSpans::Leave(int unit, bool in_backward) {
  for (size_t i = running_.size(); i-- > 0;) {
    const bool is_backward = running_[i].category == TraceCategory::kBackward;
    if (running_[i].unit != unit || is_backward != in_backward) continue;
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

void ComputeSpans::EndForward(const Record& event) {
  if (!running_.empty() || !forward_began_) return;
  spans_->Add(TraceCategory::kPhase, "forward of", event.name, *forward_began_,
              event.end_ns);
  forward_began_.reset();
}

void ComputeSpans::EndBackward(const Record& event) {
  if (backward_began_) {
    spans_->Add(TraceCategory::kPhase, "backward of", event.name,
                *backward_began_, event.end_ns);
  }
  backward_began_.reset();
  // A unit without anything trainable does not say that it is done.
  running_.erase(std::remove_if(running_.begin(), running_.end(),
                                [](const Running& running) {
                                  return running.category ==
                                         TraceCategory::kBackward;
                                }),
                 running_.end());
}

void ComputeSpans::GiveUp() {
  given_up_ = true;
  running_.clear();
  forward_began_.reset();
  backward_began_.reset();
}

}  // namespace fsdp
