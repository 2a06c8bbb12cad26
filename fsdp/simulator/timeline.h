// What a rank does when: one timeline of compute, one of what the network does
// for it meanwhile.
#ifndef FSDP_SIMULATOR_TIMELINE_H_
#define FSDP_SIMULATOR_TIMELINE_H_

#include <vector>

namespace fsdp::simulator {

enum class SpanKind {
  kForward,
  kBackward,
  kCopy,       // casts, gradients into reduce buffers and out of them
  kOptimizer,  // reading and writing what it steps
  kGather,
  kReduce,     // over the ranks that share a copy
  kReplicate,  // over the copies
  kWait,       // compute waits for communication
};
const char* Name(SpanKind kind);

// In seconds since the step began; not empty. kGather, kReduce and kReplicate
// are the network's, in the order of their start; all else is compute's, one
// after the other without gaps.
struct Span {
  SpanKind kind;
  int unit;
  double begin;
  double end;
};

class Timeline {
 public:
  double now() const { return now_; }  // of compute
  const std::vector<Span>& spans() const { return spans_; }

  void Compute(SpanKind kind, int unit, double seconds);
  // Starts behind what was started before; nothing to do takes no time. Returns
  // when it will be done.
  double Communicate(SpanKind kind, int unit, double seconds);
  // Compute waits until `time`. Returns for how long.
  double Wait(int unit, double time);

 private:
  void Add(SpanKind kind, int unit, double begin, double end);

  double now_ = 0;
  double network_free_ = 0;  // when all that was started is done
  std::vector<Span> spans_;
};

}  // namespace fsdp::simulator

#endif  // FSDP_SIMULATOR_TIMELINE_H_
