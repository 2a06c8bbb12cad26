// Scenarios of doorbells and fences.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/host/shared_host.h"
#include "comm/host/shared_segment.h"
#include "testing/interleavings/ranks.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {
namespace {

using ::fsdp::comm::Doorbell;
using ::fsdp::comm::SharedSegment;

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

// A waiter's bell, and one message slot for each rank that rings.
struct Desk {
  Doorbell bell;
  struct alignas(64) Slot {
    std::atomic<uint32_t> messages;
    uint32_t text;
  } slots[Arena::kMaxRanks];
};

// Each rank has a thread, which gets memory that all share as the rank maps it.
// A doorbell is in front.
class BellScenario final : public Scenario {
 public:
  using Body = std::function<void(int rank, char* data)>;
  BellScenario(int ranks, int64_t bytes, Body body)
      : ranks_(ranks), bytes_(bytes), body_(std::move(body)) {}

  void SetUp(Machine& machine) override {
    for (int rank = 0; rank < ranks_; ++rank) {
      machine.set_rank(rank);
      segments_.push_back(
          rank == 0 ? SharedSegment::Create(bytes_).value()
                    : SharedSegment::Open(segments_[0]->address()).value());
      machine.AddThread(rank,
                        [this, rank] { body_(rank, segments_[rank]->data()); });
    }
    const auto number = static_cast<int>(segments_[0]->address().inode) - 1;
    const uint64_t at = machine.arena().segment(number)->offset;
    machine.arena().Name(at, 4, "rings");
    machine.arena().Name(at + 4, 4, "sleepers");
  }

 private:
  const int ranks_;
  const int64_t bytes_;
  const Body body_;
  std::vector<std::unique_ptr<SharedSegment>> segments_;
};

void Send(Desk& desk, int rank, int turns) {
  Desk::Slot& slot = desk.slots[rank];
  for (int turn = 1; turn <= turns; ++turn) {
    if (turn == 1) slot.text = 100u + static_cast<uint32_t>(rank);
    slot.messages.store(static_cast<uint32_t>(turn), kRelease);
    desk.bell.Ring();
  }
}

void Receive(Desk& desk, int ranks, int turns, bool spins) {
  // No time passes while one looks, so that a turn of spinning ends by the
  // clock's own steps.
  const absl::Duration spin =
      spins ? absl::Nanoseconds(1) : absl::ZeroDuration();
  const absl::Time deadline = absl::Now() + absl::Hours(1);
  for (int rank = 1; rank < ranks; ++rank) {
    Desk::Slot& slot = desk.slots[rank];
    while (true) {
      const uint32_t seen = desk.bell.Count();
      if (slot.messages.load(kAcquire) == static_cast<uint32_t>(turns)) break;
      desk.bell.Await(seen, spin, deadline);
    }
    if (slot.text != 100u + static_cast<uint32_t>(rank)) {
      Violate("the message is not what was written before the ring");
    }
  }
}

struct alignas(64) Cell {
  uint64_t value;
};

Cell* Cells(const Rank& rank) { return reinterpret_cast<Cell*>(rank.data); }

// How often each rank has come, which is true whatever ranks see of it.
using Arrivals = std::vector<uint64_t>;

void PassFences(Rank& rank, int fences, Failures failures, Arrivals& came) {
  Cell* cells = Cells(rank);
  for (int fence = 0; fence < fences; ++fence) {
    const uint64_t round = static_cast<uint64_t>(fence) / 2 + 1;
    const bool reads = fence % 2 == 0;
    if (reads) cells[rank.rank].value = round;
    ++came[rank.rank];
    const absl::Status status = rank.PassFence();
    if (!status.ok() && failures == Failures::kExpected) return;
    ExpectOk(status, rank, "at a fence");
    for (int peer = 0; peer < rank.world_size(); ++peer) {
      if (came[peer] < came[rank.rank]) {
        Violate(absl::StrCat("rank ", rank.rank, " passes a fence before rank ",
                             peer, " has come"));
      }
      if (reads && cells[peer].value != round) {
        Violate(absl::StrCat("rank ", rank.rank, " sees ", cells[peer].value,
                             " of rank ", peer, " in round ", round));
      }
    }
  }
}

}  // namespace

MakeScenario Doorbells(int ranks, int turns, bool spins) {
  return [=] {
    return std::make_unique<BellScenario>(
        ranks, sizeof(Desk), [=](int rank, char* data) {
          Desk& desk = *reinterpret_cast<Desk*>(data);
          if (rank > 0) return Send(desk, rank, turns);
          Receive(desk, ranks, turns, spins);
        });
  };
}

MakeScenario DoorbellDeadline(int ranks) {
  return [=] {
    return std::make_unique<BellScenario>(
        ranks, sizeof(Doorbell), [](int rank, char* data) {
          Doorbell& bell = *reinterpret_cast<Doorbell*>(data);
          if (rank > 0) return bell.Ring();
          const absl::Time deadline = absl::Now() + absl::Seconds(1);
          while (absl::Now() < deadline) {
            bell.Await(bell.Count(), absl::ZeroDuration(), deadline);
          }
        });
  };
}

MakeScenario Fences(int ranks, int fences, Failures failures) {
  return [=] {
    const auto came = std::make_shared<Arrivals>(ranks);
    std::vector<RankThread> threads;
    threads.reserve(ranks);
    for (int i = 0; i < ranks; ++i) {
      threads.push_back(
          {i, [=](Rank& rank) { PassFences(rank, fences, failures, *came); }});
    }
    return MakeRanks({ranks, static_cast<int64_t>(sizeof(Cell)) * ranks},
                     std::move(threads));
  };
}

}  // namespace fsdp::interleavings
