// The interface of optimizers whose states may rest off the device, and entries
// of a store that a device still uses, which are released later.
#ifndef FSDP_RESTING_RESTING_PLACES_H_
#define FSDP_RESTING_RESTING_PLACES_H_

#include <ATen/core/Tensor.h>

#include <deque>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "offload/offloader.h"

namespace fsdp {

// Keeps entries in use until their device has finished with them. Not
// thread-safe.
class DeferredReleases {
 public:
  // `timeout` limits each wait for a device.
  DeferredReleases(offload::Offloader* offloader, absl::Duration timeout)
      : offloader_(offloader), timeout_(timeout) {}

  // Does what Offloader::Acquire() does, also for an entry whose release is
  // pending. If pending entries leave no room, it waits for their devices.
  absl::StatusOr<absl::Span<char>> Acquire(int entry,
                                           offload::Offloader::Use use);
  // Releases `bytes` of `entry` when `used` is reached, or at once if it is
  // null.
  void Release(int entry, absl::Span<char> bytes, const SharedEvent& used);
  // Returns whether a release of `entry` is pending.
  bool Has(int entry) { return Find(entry) != pending_.end(); }
  // Carries out the pending releases whose events are reached, without a wait.
  void Poll();
  // Waits for all pending releases and carries them out. DeadlineExceeded.
  absl::Status Settle();
  // Does the same for one entry, if its release is pending.
  absl::Status Settle(int entry);

 private:
  struct Pending {
    int entry;
    absl::Span<char> bytes;
    SharedEvent used;
  };

  std::deque<Pending>::iterator Find(int entry);
  absl::Status Finish(std::deque<Pending>::iterator pending);

  offload::Offloader* const offloader_;
  const absl::Duration timeout_;
  std::deque<Pending> pending_;  // the oldest first
};

// Names this library's implementations of RestingStates in texts of errors.
inline constexpr char kFusedOptimizers[] = "FusedAdamW, FusedAdam or FusedSGD";

// An optimizer whose states may rest off the device
// (fsdp/options/offload_options.h).
class RestingStates {
 public:
  virtual ~RestingStates() = default;
  // Moves states of these parameters, and of those that share memory with them,
  // that were loaded into memory to where they rest, and adds those that an
  // earlier run has kept (OffloadOptions::keep). step() does the same for all.
  // After an error some have been moved.
  virtual absl::Status TakeUpStatesOf(
      absl::Span<const at::Tensor> parameters) = 0;
};

}  // namespace fsdp

#endif  // FSDP_RESTING_RESTING_PLACES_H_
