// A store whose writes end when a test says so.
#ifndef OFFLOAD_TESTING_HELD_STORE_H_
#define OFFLOAD_TESTING_HELD_STORE_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

// A gate, which is open at first. Thread-safe.
class Gate {
 public:
  void Close();
  // Ends all that was held with `result`.
  void Open(absl::Status result = absl::OkStatus());
  // Waits until the gate is open and returns its result, or DeadlineExceeded.
  absl::Status Wait(absl::Time deadline);

 private:
  absl::Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

// Returns `base` with writes that are done at their start but end only when the
// gate is open.
std::unique_ptr<ParamStore> WithHeldWrites(std::unique_ptr<ParamStore> base,
                                           std::shared_ptr<Gate> gate);

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_HELD_STORE_H_
