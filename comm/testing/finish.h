// Waits for a collective that a test has started.
#ifndef COMM_TESTING_FINISH_H_
#define COMM_TESTING_FINISH_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// Returns the error of the start, or that of Work::Wait() after 30 s at most,
// which no working group needs.
inline absl::Status Finish(StartedWork work) {
  FSDP_RETURN_IF_ERROR(work.status());
  return (*work)->Wait(absl::Now() + absl::Seconds(30));
}

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_FINISH_H_
