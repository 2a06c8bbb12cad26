#include "fsdp/resting/deferred_releases.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "offload/offloader.h"

namespace fsdp {

using offload::Offloader;

absl::StatusOr<absl::Span<char>> DeferredReleases::Acquire(int entry,
                                                           Offloader::Use use) {
  Poll();
  const auto own = Find(entry);
  if (own != pending_.end()) {
    const absl::Span<char> bytes = own->bytes;
    pending_.erase(own);
    if (use != Offloader::Use::kRead) offloader_->MarkChanged(entry);
    return bytes;
  }
  for (;;) {
    absl::StatusOr<absl::Span<char>> bytes = offloader_->Acquire(entry, use);
    if (!absl::IsResourceExhausted(bytes.status()) || pending_.empty()) {
      return bytes;
    }
    FSDP_RETURN_IF_ERROR(Finish(pending_.begin()));
  }
}

void DeferredReleases::Release(int entry, absl::Span<char> bytes,
                               const SharedEvent& used) {
  if (used == nullptr) return offloader_->Release(entry);
  pending_.push_back({entry, bytes, used});
}

void DeferredReleases::Poll() {
  const auto done = std::stable_partition(
      pending_.begin(), pending_.end(),
      [](const Pending& pending) { return pending.used->Done(); });
  for (auto i = pending_.begin(); i != done; ++i) offloader_->Release(i->entry);
  pending_.erase(pending_.begin(), done);
}

absl::Status DeferredReleases::Settle() {
  while (!pending_.empty()) FSDP_RETURN_IF_ERROR(Finish(pending_.begin()));
  return absl::OkStatus();
}

absl::Status DeferredReleases::Settle(int entry) {
  const auto own = Find(entry);
  return own == pending_.end() ? absl::OkStatus() : Finish(own);
}

std::deque<DeferredReleases::Pending>::iterator DeferredReleases::Find(
    int entry) {
  return std::find_if(
      pending_.begin(), pending_.end(),
      [entry](const Pending& pending) { return pending.entry == entry; });
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): an iterator.
absl::Status DeferredReleases::Finish(std::deque<Pending>::iterator pending) {
  if (!pending->used->Wait(absl::Now() + timeout_)) {
    return absl::DeadlineExceededError(absl::StrCat(
        "the device has not come to the end of a copy within ",
        absl::FormatDuration(timeout_), ": it hangs, or has more to do"));
  }
  offloader_->Release(pending->entry);
  pending_.erase(pending);
  return absl::OkStatus();
}

}  // namespace fsdp
