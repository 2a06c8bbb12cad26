#include "comm/host/doorbell.h"

#include <atomic>
#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

constexpr absl::Duration kLong = absl::Seconds(30);

TEST(DoorbellTest, ReturnsAtTheDeadline) {
  const auto bell = std::make_unique<Doorbell>();
  for (absl::Duration spin : {absl::ZeroDuration(), kLong}) {
    const absl::Time until = absl::Now() + absl::Milliseconds(5);
    while (absl::Now() < until) bell->Await(bell->Count(), spin, until);
  }
  bell->Await(bell->Count(), kLong, absl::InfinitePast());
}

// Two threads take turns, and none could go on without the other's ring.
TEST(DoorbellTest, NoRingIsMissed) {
  constexpr int kTurns = 20'000;
  struct Shared {
    Doorbell bells[2];
    std::atomic<int> turn{0};
  };
  for (absl::Duration spin : {absl::ZeroDuration(), absl::Microseconds(1)}) {
    const auto shared = std::make_unique<Shared>();
    const auto play = [&shared, spin](int player) {
      for (int i = player; i < kTurns; i += 2) {
        while (true) {
          const uint32_t seen = shared->bells[player].Count();
          if (shared->turn.load() == i) break;
          shared->bells[player].Await(seen, spin, absl::Now() + kLong);
        }
        shared->turn.store(i + 1);
        shared->bells[1 - player].Ring();
      }
    };
    const absl::Time begin = absl::Now();
    std::thread other(play, 1);
    play(0);
    other.join();
    EXPECT_EQ(shared->turn.load(), kTurns);
    EXPECT_LT(absl::Now() - begin, kLong);
  }
}

}  // namespace
}  // namespace fsdp::comm
