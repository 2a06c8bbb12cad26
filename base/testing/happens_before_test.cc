#include "base/testing/happens_before.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kHost = HappensBefore::kHost;
constexpr int kA = HappensBefore::ActorOf(0);
constexpr int kB = HappensBefore::ActorOf(1);
constexpr int kC = HappensBefore::ActorOf(2);

TEST(HappensBefore, ReadsDoNotRaceNorDoNeighbours) {
  HappensBefore order;
  order.Access(kA, {{100, 110}}, false, "one");
  order.Access(kB, {{100, 110}}, false, "other");
  order.Access(kB, {{110, 120}}, true, "after");
  order.Access(kC, {{90, 100}, {120, 121}}, true, "around");
  order.Access(kC, {{105, 105}}, true, "nothing");
  EXPECT_THAT(order.races(), IsEmpty());
}

TEST(HappensBefore, FreeingSparesWhatThoseItWaitsForHaveWaitedFor) {
  for (const bool waits : {false, true}) {
    HappensBefore order;
    order.Access(kC, {{0, 10}}, /*writes=*/true, "reduce");
    if (waits) order.Wait(kB, order.Record(kC));
    order.Access(kB, {{20, 30}}, /*writes=*/true, "sum");
    order.Free(kA, {0, 10}, {kB}, "free");
    EXPECT_THAT(order.races(), SizeIs(waits ? 0 : 1));
  }
}

TEST(HappensBefore, ForgetsOnlyTheRange) {
  HappensBefore order;
  order.Access(kA, {{0, 30}}, true, "write");
  order.Forget({10, 20});
  order.Access(kB, {{10, 20}}, true, "inside");
  EXPECT_THAT(order.races(), IsEmpty());
  order.Access(kB, {{9, 10}}, true, "below");
  order.Access(kB, {{20, 21}}, true, "above");
  EXPECT_THAT(order.races(), SizeIs(2));
}

// The oracle remembers every access to every byte and every actor's past as a
// set of accesses.
TEST(HappensBefore, AgreesWithAnOracleThatForgetsNothing) {
  constexpr int kActors = 4;
  constexpr uintptr_t kBytes = 7;
  std::mt19937 random(7);
  int with_races = 0;
  for (int round = 0; round < 300; ++round) {
    HappensBefore order;
    struct Done {
      int actor;
      uintptr_t byte;
      bool writes;
    };
    std::vector<Done> all;
    std::vector<std::vector<bool>> known(kActors);  // by actor, by access
    bool expected = false;
    // The test stops at the first race, after which the detector may forget.
    for (int step = 0; step < 30 && !expected; ++step) {
      const int actor = static_cast<int>(random() % kActors);
      if (random() % 2 == 0) {
        int other = static_cast<int>(random() % kActors);
        if (other == kHost) other = actor;  // the host records no events
        for (auto& past : known) past.resize(all.size());
        if (other != kHost) {
          for (size_t i = 0; i < all.size(); ++i) {
            if (known[kHost][i]) known[other][i] = true;
          }
        }
        order.Wait(actor, order.Record(other));
        for (size_t i = 0; i < all.size(); ++i) {
          if (known[other][i]) known[actor][i] = true;
        }
        continue;
      }
      const Done done{actor, random() % kBytes, random() % 3 == 0};
      for (auto& past : known) past.resize(all.size() + 1);
      for (size_t i = 0; i < all.size(); ++i) {
        if (known[kHost][i]) known[actor][i] = true;
        expected |= all[i].byte == done.byte && all[i].actor != actor &&
                    (all[i].writes || done.writes) && !known[actor][i];
      }
      known[actor][all.size()] = true;
      all.push_back(done);
      order.Access(actor, {{done.byte, done.byte + 1}}, done.writes, "access");
    }
    EXPECT_EQ(!order.races().empty(), expected) << "round " << round;
    with_races += expected ? 1 : 0;
  }
  EXPECT_GT(with_races, 30);
  EXPECT_LT(with_races, 290);
}

}  // namespace
}  // namespace fsdp::testing
