#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/shared_memory/shared_group.h"

namespace fsdp::comm {
namespace {

// The interval at which waiting ranks look for dead peers.
constexpr absl::Duration kProcessCheckInterval = absl::Milliseconds(50);

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

// The arrivals of one rank, on a cache line of their own.
struct alignas(64) FenceCounter {
  std::atomic<uint64_t> arrivals;
};

}  // namespace

absl::Status SharedGroup::Await(const Awaited& awaited, absl::Time deadline) {
  while (true) {
    const uint32_t rings = host_->NumRings();
    {
      absl::MutexLock lock(&host_->mutex());
      host_->ProgressAll();
      if (PassOrFail(awaited, deadline)) {
        return failure_ && !awaited.is_done() ? Error(awaited.name())
                                              : absl::OkStatus();
      }
    }
    host_->AwaitRing(rings,
                     std::min(deadline, absl::Now() + kProcessCheckInterval));
  }
}

// Returns whether the wait is over, well or not.
bool SharedGroup::PassOrFail(const Awaited& awaited, absl::Time deadline) {
  if (awaited.is_done() || failure_ || EchoFailure()) return true;
  if (FailsWithPeers(awaited)) return true;
  if (absl::Now() < deadline) return false;
  std::vector<std::string> missing;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank_ && awaited.is_missing(peer)) {
      missing.push_back(LastSeen(peer));
    }
  }
  const std::string text = absl::StrCat(
      "not done at the deadline; still missing: ",
      missing.empty() ? "nobody any more" : absl::StrJoin(missing, ", "));
  Fail({absl::DeadlineExceededError(text),
        absl::StrCat(names_.Name(rank_), " gave up waiting for ",
                     awaited.name(), ": ", text),
        absl::StatusCode::kAborted});
  return true;
}

// Fails, and returns true, if a peer that this rank waits for is gone.
bool SharedGroup::FailsWithPeers(const Awaited& awaited) {
  const absl::Time now = absl::Now();
  const bool check_processes = now >= next_check_of_processes_;
  if (check_processes) next_check_of_processes_ = now + kProcessCheckInterval;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank_ || !awaited.is_missing(peer)) continue;
    if (!HasLeft(peer) && !(check_processes && HasEnded(peer))) continue;
    // Whatever the peer did before it went counts.
    host_->ProgressAll();
    if (awaited.is_done() || !awaited.is_missing(peer)) return false;
    const std::string text = Gone(peer);
    Fail({absl::UnavailableError(text), text, absl::StatusCode::kUnavailable});
    return true;
  }
  return false;
}

bool SharedGroup::HasLeft(int peer) const {
  return peers_[peer].block->status.load(kAcquire) == SharedRankBlock::kLeft;
}

bool SharedGroup::HasEnded(int peer) const {
  return host_->process(peers_[peer].world_rank).HasEnded();
}

// Takes over the failure of a peer; returns whether the group has failed.
bool SharedGroup::EchoFailure() {
  if (failure_) return true;
  for (int peer = 0; peer < world_size(); ++peer) {
    const SharedRankBlock& block = *peers_[peer].block;
    if (block.status.load(kAcquire) != SharedRankBlock::kFailed) continue;
    const auto code = static_cast<absl::StatusCode>(block.failure_code);
    const std::string text = block.failure.ToString();
    Fail({absl::Status(code, text), text, code});
    return true;
  }
  return false;
}

void SharedGroup::Fail(Failure failure) {
  if (failure_) return;
  own().failure_code = static_cast<int32_t>(failure.code_of_others);
  own().failure.Set(failure.text);
  own().status.store(SharedRankBlock::kFailed, kRelease);
  failure_ = std::move(failure);
  queue_.clear();
  lent_.clear();
  RingPeers();
  host_->Ring(peers_[rank_].world_rank);  // for other threads of this rank
}

absl::Status SharedGroup::Error(absl::string_view name) const {
  return Annotate(failure_->status,
                  absl::StrCat(name, " on ", names_.Place(rank_)));
}

std::string SharedGroup::Gone(int peer) const {
  return absl::StrCat(LastSeen(peer), HasLeft(peer)
                                          ? " has left the group: its function "
                                            "has returned, or its communicator "
                                            "was destroyed"
                                          : " is gone");
}

std::string SharedGroup::LastSeen(int peer) const {
  const SharedRankBlock& block = *peers_[peer].block;
  const uint64_t arrived = block.arrived.load(kAcquire);
  std::string text = names_.Name(peer);
  if (arrived == 0) {
    absl::StrAppend(&text, " (no call so far");
  } else {
    const uint64_t last = arrived - 1;
    const PostedCall& posted = block.calls[last % SharedRankBlock::kCalls];
    absl::StrAppend(&text, " (last seen in ",
                    Name(CallOf(posted.call), static_cast<int64_t>(last)));
  }
  const PeerProcess& process = host_->process(peers_[peer].world_rank);
  const PeerProcess& own_process = host_->process(peers_[rank_].world_rank);
  if (process.pid() != own_process.pid()) {
    absl::StrAppend(&text, "; ", process.Describe());
  }
  return absl::StrCat(text, ")");
}

void SharedGroup::RingPeers() {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank_) host_->Ring(peers_[peer].world_rank);
  }
}

void SharedGroup::Abort(const absl::Status& reason) {
  const std::string text =
      absl::StrCat(names_.Name(rank_), " aborted: ", reason.message());
  absl::MutexLock lock(&host_->mutex());
  Fail({absl::AbortedError(text), text, absl::StatusCode::kAborted});
}

void SharedGroup::Leave() {
  absl::MutexLock lock(&host_->mutex());
  if (!failure_) {
    const std::string text =
        absl::StrCat(names_.Name(rank_), " has destroyed its communicator");
    failure_ =
        Failure{absl::AbortedError(text), text, absl::StatusCode::kUnavailable};
    own().status.store(SharedRankBlock::kLeft, kRelease);
  }
  queue_.clear();
  lent_.clear();
  RingPeers();
}

void SharedGroup::Seal() { peers_[rank_].segment->Seal(); }

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
