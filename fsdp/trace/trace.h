// Where the time of training steps goes: a trace of what a rank gathers, waits
// for, copies and computes, unit by unit. Perfetto (ui.perfetto.dev) and
// chrome://tracing show it, //tools:trace_report sums it up.
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

struct TraceOptions {
  int rank = 0;
  // Spans kept, at 56 bytes each; beyond it the oldest go. A step has about 25
  // for every unit.
  int64_t capacity = 1 << 17;
};

// Records what the models of this thread do, TraceStep, TraceSpan and
// RECORD_USER_SCOPE, from Start() to Stop(); backward, too, which on CPU runs
// in the thread that calls it. Times are those of the host's clock: of ranks on
// several hosts they compare as well as these clocks agree.
class Trace {
 public:
  // InvalidArgument: a negative rank, no capacity. FailedPrecondition: this
  // thread records already, or LibTorch's recording is off in it.
  static absl::StatusOr<std::unique_ptr<Trace>> Start(
      const TraceOptions& options);
  // As Stop().
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // In the thread that started it, between steps. What has been recorded stays.
  void Stop();

  int64_t num_dropped() const;  // of the oldest spans

  // One file of this rank alone, whole or not at all, with the last
  // `last_steps` steps; 0: with all.
  absl::Status Write(const std::string& path, int64_t last_steps = 0) const;
  // What such a file consists of, with times since `base_ns`, in nanoseconds
  // since 1970: see trace_json.h.
  std::string Events(int64_t base_ns, int64_t last_steps) const;
  int64_t start_ns() const { return start_ns_; }

 private:
  Trace(int rank, std::shared_ptr<TraceBuffer> buffer);

  const int rank_;
  const int64_t start_ns_;
  const std::shared_ptr<TraceBuffer> buffer_;
};

// Collective: rank 0 writes one file with what all ranks have recorded, whole
// or not at all. OK, or an error, on all ranks alike. What can be written is
// known before a long run by OutputFile::Open() (base/output_file.h).
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

 private:
  const TraceBuffer* const buffer_;  // null: nobody records
};

// The same for a training step.
class TraceStep {
 public:
  explicit TraceStep(int64_t number);
  ~TraceStep();
  TraceStep(const TraceStep&) = delete;
  TraceStep& operator=(const TraceStep&) = delete;

 private:
  const TraceBuffer* const buffer_;  // null: nobody records
};

}  // namespace fsdp

#endif  // FSDP_TRACE_TRACE_H_
