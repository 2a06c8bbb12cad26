#include "fsdp/trace/trace.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "fsdp/trace/trace_timeline.h"

namespace fsdp {
namespace {

// The buffer into which this thread records.
thread_local std::shared_ptr<TraceBuffer> current;

int64_t SteadyNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns nanoseconds since 1970. Reads the system's clock only once: it may be
// set back, and spans would overlap.
int64_t NowNanos() {
  static const int64_t begin = absl::GetCurrentTimeNanos() - SteadyNanos();
  return begin + SteadyNanos();
}

void Begin(TraceScope scope, absl::string_view name) {
  current->Begin(scope, name, NowNanos());
}

// Ends a scope that began while `buffer` was the current one.
void End(const TraceBuffer* buffer) {
  if (buffer == nullptr || buffer != current.get()) return;
  current->End(NowNanos());
}

// ShardedModel passes the unit's sizes as inputs of its events' scopes.
std::unique_ptr<at::ObserverContext> OnStart(
    const at::RecordFunction& function) {
  if (current == nullptr) return nullptr;
  const NamedScope scope = ParseScope(function.name());
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  if (scope.scope.kind == TraceScope::Kind::kEvent && inputs.size() == 2) {
    current->SetUnitBytes(scope.name, {inputs[0].toInt(), inputs[1].toInt()});
  }
  Begin(scope.scope, scope.name);
  return nullptr;
}

void OnEnd(const at::RecordFunction&, at::ObserverContext*) {
  End(current.get());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trace>> Trace::Start(
    const TraceOptions& options) {
  if (options.rank < 0 || options.capacity < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a trace of rank ", options.rank, " with room for ", options.capacity,
        " spans: give it a rank of 0 or more and room for at "
        "least one"));
  }
  if (current != nullptr) {
    return absl::FailedPreconditionError(
        "this thread's models are being traced already: stop that trace first");
  }
  if (!at::isRecordFunctionEnabled()) {
    return absl::FailedPreconditionError(
        "LibTorch's recording is off in this thread, so a trace would stay "
        "empty: start it outside of at::DisableRecordFunctionGuard");
  }
  auto buffer = std::make_shared<TraceBuffer>(options.capacity);
  current = buffer;
  at::addThreadLocalCallback(at::RecordFunctionCallback(&OnStart, &OnEnd)
                                 .needsInputs(true)
                                 .scopes({at::RecordScope::USER_SCOPE}));
  return std::unique_ptr<Trace>(new Trace(options.rank, std::move(buffer)));
}

Trace::Trace(int rank, std::shared_ptr<TraceBuffer> buffer)
    : rank_(rank), start_ns_(NowNanos()), buffer_(std::move(buffer)) {}

Trace::~Trace() { Stop(); }

void Trace::Stop() {
  if (current != buffer_) return;
  // Looks the handles up, because autograd's engine restores a thread's
  // callbacks after each node.
  std::vector<at::CallbackHandle> handles;
  for (const at::RecordFunctionCallbacksEntry& entry :
       at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.callback_.start() == &OnStart) handles.push_back(entry.handle_);
  }
  for (const at::CallbackHandle handle : handles) at::removeCallback(handle);
  current = nullptr;
}

int64_t Trace::num_dropped() const { return buffer_->num_dropped(); }

std::string Trace::Events(int64_t base_ns, int64_t last_steps) const {
  return TraceEvents(MakeTimeline(*buffer_, last_steps),
                     {rank_, base_ns, num_dropped()});
}

absl::Status Trace::Write(const std::string& path, int64_t last_steps) const {
  return WriteOutputFile(path, TraceFile({Events(start_ns_, last_steps)}));
}

absl::Status WriteTrace(const Trace& trace, comm::Communicator& communicator,
                        const std::string& path, int64_t last_steps) {
  constexpr char kWhat[] = "writing a trace";
  const auto deadline = [&communicator] {
    return absl::Now() + communicator.default_timeout();
  };
  FSDP_ASSIGN_OR_RETURN(
      const std::string base,
      comm::BroadcastString(communicator, absl::StrCat(trace.start_ns()), 0,
                            kWhat, deadline()));
  int64_t base_ns = 0;
  FSDP_CHECK(absl::SimpleAtoi(base, &base_ns));
  const std::string mine = trace.Events(base_ns, last_steps);
  std::vector<std::string> events;
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    FSDP_ASSIGN_OR_RETURN(
        std::string text,
        comm::BroadcastString(communicator, mine, rank, kWhat, deadline()));
    if (communicator.rank() == 0) events.push_back(std::move(text));
  }
  absl::Status written;
  if (communicator.rank() == 0)
    written = WriteOutputFile(path, TraceFile(events));
  return comm::Agree(communicator, written, kWhat, deadline());
}

TraceSpan::TraceSpan() : buffer_(current.get()) {}

TraceSpan::TraceSpan(absl::string_view name) : TraceSpan() {
  if (buffer_ != nullptr) Begin({TraceScope::Kind::kUser}, name);
}

TraceSpan::~TraceSpan() { End(buffer_); }

TraceStep::TraceStep(int64_t number) {
  if (current == nullptr) return;
  TraceScope scope = {TraceScope::Kind::kStep};
  scope.step = number;
  Begin(scope, "step");
}

}  // namespace fsdp
