// A plan, as text, of the faults of a run and of their times, and communicators
// whose operations bring a rank its fault.
#ifndef TESTING_GPT_TESTING_FAULTS_H_
#define TESTING_GPT_TESTING_FAULTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace gpt {

enum class FaultKind {
  kKill,   // SIGKILL
  kStop,   // SIGSTOP
  kSegv,   // SIGSEGV
  kAbort,  // SIGABRT
  kThrow,  // an exception from the operation
  kError,  // a Status of the operation
  kExit,   // the process exits with 0
  kNan,    // gradients of this rank are NaN
  kSlow,   // steps of this rank take ten times as long from here on
};

// A fault comes with the `call`-th operation, from 0, of this kind in the
// `step`-th step, from 1, that the rank takes in the attempt. Operations are
// all-gathers, reduce-scatters and all-reduces.
struct Fault {
  FaultKind kind = FaultKind::kKill;
  int restart = 0;
  int replica = 0;  // also where there are none
  int rank = 0;
  int64_t step = 1;
  std::optional<fsdp::comm::Collective> operation;  // unset: any
  int64_t call = 0;
  bool in_wait = false;  // in the wait for it instead of at its start
};

// Parses
// "fault=kill,rank=1,step=3,operation=reduce_scatter,call=2,when=wait;...".
// A field that is left out is as in Fault. InvalidArgument names the mistake.
absl::StatusOr<std::vector<Fault>> ParseFaultPlan(absl::string_view text);

// Returns `plan`'s first fault for this rank in this attempt of its replica.
std::optional<Fault> FaultOf(const std::vector<Fault>& plan, int restart,
                             int replica, int rank);

// Returns "kill", for example.
absl::string_view Name(FaultKind kind);

// The trainer's all-reduce of "loss" ends a step. Before the fault a line goes
// to standard error: "injected kill into step 3 at 1763900000.123456", with the
// time of the host's clock.
std::unique_ptr<fsdp::comm::Communicator> WithFault(
    std::unique_ptr<fsdp::comm::Communicator> base, const Fault& fault);

// Makes steps take kSlowStep longer while there is a file `path`.
inline constexpr absl::Duration kSlowStep = absl::Milliseconds(200);
std::unique_ptr<fsdp::comm::Communicator> SlowWhile(
    std::unique_ptr<fsdp::comm::Communicator> base, const std::string& path);

}  // namespace gpt

#endif  // TESTING_GPT_TESTING_FAULTS_H_
