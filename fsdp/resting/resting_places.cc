#include "fsdp/resting/resting_places.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/resting/deferred_releases.h"
#include "offload/host_store.h"
#include "offload/offloader.h"

namespace fsdp {
namespace {

using offload::Offloader;

Offloader::Use ToOffloaderUse(Use use) {
  switch (use) {
    case Use::kRead:
      return Offloader::Use::kRead;
    case Use::kUpdate:
      return Offloader::Use::kUpdate;
    case Use::kOverwrite:
      return Offloader::Use::kOverwrite;
  }
  return Offloader::Use::kUpdate;
}

comm::StoreWait WaitOf(Use use) {
  return use == Use::kOverwrite ? comm::StoreWait::kRoom
                                : comm::StoreWait::kRead;
}

class StorePlace final : public RestingPlace {
 public:
  StorePlace(Offloader* offloader, DeferredReleases* releases, int entry,
             bool* changed, RestingNotes notes,
             std::shared_ptr<const void> owner)
      : offloader_(offloader),
        releases_(releases),
        entry_(entry),
        changed_(changed),
        notes_(std::move(notes)),
        owner_(std::move(owner)) {}
  ~StorePlace() override {
    *changed_ = true;
    releases_->Settle(entry_).IgnoreError();
    offloader_->Remove(entry_).IgnoreError();
  }

  void Prefetch() override {
    releases_->Poll();
    if (!releases_->Has(entry_)) offloader_->Prefetch(entry_);
  }
  absl::StatusOr<char*> Acquire(Use use) override {
    if (use != Use::kRead) *changed_ = true;
    const comm::StoreWaitScope wait(notes_.activity.get(), WaitOf(use),
                                    notes_.what);
    FSDP_ASSIGN_OR_RETURN(bytes_,
                          releases_->Acquire(entry_, ToOffloaderUse(use)));
    return bytes_.data();
  }
  void MarkChanged() override {
    *changed_ = true;
    offloader_->MarkChanged(entry_);
  }
  void Release(const SharedEvent& used) override {
    releases_->Release(entry_, bytes_, used);
  }

 private:
  Offloader* const offloader_;
  DeferredReleases* const releases_;
  const int entry_;
  absl::Span<char> bytes_;  // while acquired
  bool* const changed_;
  const RestingNotes notes_;
  const std::shared_ptr<const void> owner_;
};

class HostPlace final : public RestingPlace {
 public:
  HostPlace(offload::HostStore* store, std::string region, char* memory,
            std::shared_ptr<const void> owner)
      : store_(store),
        region_(std::move(region)),
        memory_(memory),
        owner_(std::move(owner)) {}
  ~HostPlace() override { store_->Erase(region_).IgnoreError(); }

  void Prefetch() override {}
  absl::StatusOr<char*> Acquire(Use /*use*/) override { return memory_; }
  void MarkChanged() override {}
  void Release(const SharedEvent& /*used*/) override {}

 private:
  offload::HostStore* const store_;
  const std::string region_;
  char* const memory_;
  const std::shared_ptr<const void> owner_;
};

}  // namespace

// Keeps the end of a long name, which says more than its beginning.
std::string RegionName(int flat, absl::string_view unit) {
  constexpr size_t kMostOfName = 200;
  if (unit.size() > kMostOfName) unit.remove_prefix(unit.size() - kMostOfName);
  return absl::StrCat(unit, " #", flat);
}

std::unique_ptr<RestingPlace> PlaceInStore(Offloader* offloader,
                                           DeferredReleases* releases,
                                           int entry, bool* changed,
                                           RestingNotes notes,
                                           std::shared_ptr<const void> owner) {
  return std::make_unique<StorePlace>(offloader, releases, entry, changed,
                                      std::move(notes), std::move(owner));
}

std::unique_ptr<RestingPlace> PlaceOnHost(offload::HostStore* store,
                                          std::string region, char* memory,
                                          std::shared_ptr<const void> owner) {
  return std::make_unique<HostPlace>(store, std::move(region), memory,
                                     std::move(owner));
}

}  // namespace fsdp
