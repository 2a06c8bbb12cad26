// Entries of an offloader that a device still reads or writes when they are
// released.
#ifndef FSDP_RESTING_DEFERRED_RELEASES_H_
#define FSDP_RESTING_DEFERRED_RELEASES_H_

#include <deque>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "fsdp/memory/device_copies.h"
#include "offload/offloader.h"

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

}  // namespace fsdp

#endif  // FSDP_RESTING_DEFERRED_RELEASES_H_
