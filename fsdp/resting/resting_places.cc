#include "fsdp/resting/resting_places.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "fsdp/memory/device_copies.h"

namespace fsdp {

using offload::Offloader;

absl::StatusOr<absl::Span<char>> DeferredReleases::Acquire(int entry,
                                                           Offloader::Use use) {
  Poll();
  const auto own = Find(entry);
  if (own != pending_.end()) {
    absl::Span<char> bytes = own->bytes;
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
  FSDP_RETURN_IF_ERROR(AwaitCopy(pending->used, absl::Now() + timeout_));
  offloader_->Release(pending->entry);
  pending_.erase(pending);
  return absl::OkStatus();
}

}  // namespace fsdp
