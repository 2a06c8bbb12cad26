// Shows where the time of training steps goes: traces what a rank gathers,
// waits for, copies and computes, unit by unit. Perfetto (ui.perfetto.dev) and
// chrome://tracing show a trace, and //tools:trace_report sums it up.
//
//   FSDP_ASSIGN_OR_RETURN(auto trace, fsdp::Trace::Start({rank}));
//   for (...) {
//     const fsdp::TraceStep step(i);
//     ...  // forward and backward
//     const fsdp::TraceSpan span("optimizer");
//     optimizer.step();
//   }
//   FSDP_RETURN_IF_ERROR(fsdp::WriteTrace(*trace, communicator, "trace.json"));
#ifndef FSDP_TRACE_TRACE_H_
#define FSDP_TRACE_TRACE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace fsdp {

class TraceBuffer;

// Options of Trace::Start().
struct TraceOptions {
  int rank = 0;  // under which a trace of all ranks shows this one
  // The number of spans that are kept, of 56 bytes each; after that the oldest
  // are dropped. A step has about 25 for every unit.
  int64_t capacity = 1 << 17;
};

// Records the models of this thread, TraceStep, TraceSpan and RECORD_USER_SCOPE
// from Start() to Stop(). That includes backward, which on the CPU runs in the
// thread that calls it. Times are from the host's clock, so ranks on several
// hosts compare only as well as these clocks agree.
class Trace {
 public:
  // InvalidArgument: the rank is negative, or the capacity is not positive.
  // FailedPrecondition: this thread records already, or LibTorch's recording is
  // off in it.
  static absl::StatusOr<std::unique_ptr<Trace>> Start(
      const TraceOptions& options);
  // Calls Stop().
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Ends recording and keeps what was recorded. Call it in the thread that
  // started the trace, between steps.
  void Stop();

  // Returns how many spans, the oldest ones, were dropped.
  int64_t num_dropped() const;

  // Writes a file of this rank alone, complete or not at all, with the last
  // `last_steps` steps; 0 means all.
  absl::Status Write(const std::string& path, int64_t last_steps = 0) const;
  // Returns the events of such a file (trace_timeline.h). Times count from
  // `base_ns`, in nanoseconds since 1970.
  std::string Events(int64_t base_ns, int64_t last_steps) const;
  // When it started, in nanoseconds since 1970.
  int64_t start_ns() const { return start_ns_; }

 private:
  Trace(int rank, std::shared_ptr<TraceBuffer> buffer);

  const int rank_;
  const int64_t start_ns_;
  const std::shared_ptr<TraceBuffer> buffer_;
};

// Makes rank 0 write one file with the traces of all ranks, complete or not at
// all. Collective, with the same status on all ranks. OutputFile::Open()
// (base/output_file.h) tells before a long run whether the file can be written.
absl::Status WriteTrace(const Trace& trace, comm::Communicator& communicator,
                        const std::string& path, int64_t last_steps = 0);

// Marks a range of the program in this thread's trace, if there is one. Ranges
// nest.
class TraceSpan {
 public:
  explicit TraceSpan(absl::string_view name);
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 protected:
  TraceSpan();  // begins nothing

 private:
  const TraceBuffer* const buffer_;  // null: nobody records
};

// Marks a training step in this thread's trace, if there is one.
class TraceStep : public TraceSpan {
 public:
  explicit TraceStep(int64_t number);
};

}  // namespace fsdp

#endif  // FSDP_TRACE_TRACE_H_
