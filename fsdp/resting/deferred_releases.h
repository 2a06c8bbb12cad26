// Entries of an offloader that a device still reads or writes when they are
// released.
#ifndef FSDP_RESTING_DEFERRED_RELEASES_H_
#define FSDP_RESTING_DEFERRED_RELEASES_H_

#include <c10/core/Device.h>

#include <deque>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/options/offload_options.h"
#include "offload/offloader.h"
#include "offload/page_memory.h"

namespace fsdp {

// They stay in use until their device has come so far. Not thread-safe.
class DeferredReleases {
 public:
  // `timeout`: of each wait for a device.
  DeferredReleases(offload::Offloader* offloader, absl::Duration timeout)
      : offloader_(offloader), timeout_(timeout) {}

  // As Offloader::Acquire(), also for an entry whose release is still to come.
  // Waits for devices where their entries leave no room.
  absl::StatusOr<absl::Span<char>> Acquire(int entry,
                                           offload::Offloader::Use use);
  // Releases `bytes` of `entry` when `used` is reached; at once where it is
  // null.
  void Release(int entry, absl::Span<char> bytes, const SharedEvent& used);
  bool Has(int entry) { return Find(entry) != pending_.end(); }
  // Makes those good whose devices have come so far.
  void Poll();
  // Makes all good. DeadlineExceeded.
  absl::Status Settle();
  // That of one entry, if there is one to come.
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

// Whether a device or the host steps faster what rests on the host, found by
// trying.

// Of one rank, in bytes per second.
struct StepRates {
  double up = 0;         // copies from the host to the device
  double down = 0;       // and back
  double host_step = 0;  // parameters in float32 that the host steps by AdamW

  // "up 51.2 GB/s, down 49.8 GB/s, the host's AdamW 3.1 GB/s of parameters".
  std::string ToString() const;
};

// Takes less than a second, and 64 MiB of `pages` and of the device.
// DeadlineExceeded: the device does not answer.
absl::StatusOr<StepRates> MeasureStepRates(c10::Device device,
                                           offload::PageAllocator& pages,
                                           absl::Time deadline);

// The least of each rate over all ranks. Collective.
absl::StatusOr<StepRates> SlowestStepRates(const StepRates& mine,
                                           comm::Communicator& world,
                                           absl::string_view what,
                                           absl::Time deadline);

// kHost or kDevice: where a step takes less time with all that rests elsewhere
// on its way at the same time, copies up, copies down and computing beside each
// other. What the device itself computes costs nothing; on a tie it steps.
StepOn FasterPlace(const StepRates& rates, const OffloadOptions& options);

}  // namespace fsdp

#endif  // FSDP_RESTING_DEFERRED_RELEASES_H_
