// A communicator whose operations wait for the test's permission.
#ifndef COMM_TESTING_DELAYING_COMMUNICATOR_H_
#define COMM_TESTING_DELAYING_COMMUNICATOR_H_

#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// Knows which labels are held. Thread-safe.
class Gate {
 public:
  // Holds the operations of `label` that are started from now on.
  void Hold(absl::string_view label);

  // Releases `label`, or all labels.
  void Release(absl::string_view label);
  void ReleaseAll();

  // Blocks until an operation of `label` has been started and held.
  absl::Status AwaitHeld(absl::string_view label, absl::Time deadline);

 private:
  friend class DelayingCommunicator;

  // Notes that an operation of `label` starts. Returns true if it is held.
  bool Enter(absl::string_view label);
  bool IsOpen(absl::string_view label);
  absl::Status AwaitOpen(absl::string_view label, absl::Time deadline);

  absl::Mutex mutex_;
  std::set<std::string, std::less<>> held_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string, std::less<>> seen_ ABSL_GUARDED_BY(mutex_);
};

// Returns a communicator that starts operations in `base` only when `gate`,
// which outlives it, releases them. Until then nothing is moved, and the peers
// see a rank that is late. A held operation also holds those after it. Released
// operations are started by the next call or Wait() of this rank, so there is
// no other thread. A deadline that passes at the gate aborts `base`.
std::unique_ptr<Communicator> Delay(std::unique_ptr<Communicator> base,
                                    Gate* gate);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_DELAYING_COMMUNICATOR_H_
