#include <atomic>

#include "absl/strings/str_cat.h"
#include "comm/shared_memory/shared_group.h"

namespace fsdp::comm {
namespace {

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

// The arrivals of one rank, on a cache line of their own.
struct alignas(64) FenceCounter {
  std::atomic<uint64_t> arrivals;
};

}  // namespace

class SharedGroup::SharedFence final : public Fence {
 public:
  SharedFence(std::shared_ptr<SharedGroup> group,
              std::shared_ptr<SharedSegment> segment)
      : group_(std::move(group)), segment_(std::move(segment)) {}

  void Arrive() override {
    counter(group_->rank()).arrivals.store(++arrivals_, kRelease);
    group_->RingPeers();
  }

  absl::Status Wait(absl::Time deadline) override {
    const auto is_missing = [this](int peer) {
      return counter(peer).arrivals.load(kAcquire) < arrivals_;
    };
    const auto is_done = [&] {
      for (int peer = 0; peer < group_->world_size(); ++peer) {
        if (is_missing(peer)) return false;
      }
      return true;
    };
    if (is_done()) return absl::OkStatus();
    const auto name = [this] { return absl::StrCat("fence #", arrivals_); };
    return group_->Await({name, is_done, is_missing}, deadline);
  }

 private:
  FenceCounter& counter(int rank) const {
    return reinterpret_cast<FenceCounter*>(segment_->data())[rank];
  }

  const std::shared_ptr<SharedGroup> group_;
  const std::shared_ptr<SharedSegment> segment_;
  uint64_t arrivals_ = 0;
};

int64_t SharedGroup::FenceBytes(int world_size) {
  return static_cast<int64_t>(sizeof(FenceCounter)) * world_size;
}

std::unique_ptr<Fence> SharedGroup::MakeFence(
    std::shared_ptr<SharedSegment> segment) {
  return std::make_unique<SharedFence>(shared_from_this(), std::move(segment));
}

}  // namespace fsdp::comm
