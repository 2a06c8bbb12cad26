#include "comm/host/shared_host.h"

#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 1021;

std::shared_ptr<SharedSegment> Segment() {
  return SharedSegment::Create(kBytes).value();
}

TEST(SharedHeapTest, FindsWhatLiesWithinOneTensor) {
  const auto heap = std::make_shared<SharedHeap>([] {});
  const auto segment = Segment();
  const at::Tensor first = heap->MakeTensor(segment, 0, 100);
  const at::Tensor second = heap->MakeTensor(segment, 100, 50);
  const char* const data = segment->data();
  const struct {
    int64_t begin;
    int64_t bytes;
    bool found;
  } cases[] = {
      {0, 100, true},  {0, 0, true},     {99, 1, true},  {100, 50, true},
      {149, 1, true},  {0, 101, false},  {99, 2, false}, {149, 2, false},
      {150, 1, false}, {1000, 1, false}, {-1, 1, false},
  };
  for (const auto& c : cases) {
    const SharedPlace place = heap->Find(data + c.begin, c.bytes);
    EXPECT_EQ(place.exists(), c.found) << c.begin << " " << c.bytes;
    if (!c.found) continue;
    EXPECT_TRUE(place.segment == segment->address());
    EXPECT_EQ(place.offset, c.begin);
  }
}

TEST(SharedHeapTest, ATensorsEndIsToldAndItsMemoryForgotten) {
  int freed = 0;
  auto heap = std::make_shared<SharedHeap>([&] { ++freed; });
  auto segment = Segment();
  const std::weak_ptr<SharedSegment> alive = segment;
  const char* const data = segment->data();
  at::Tensor tensor = heap->MakeTensor(std::move(segment), 7, 11);
  EXPECT_TRUE(heap->Find(data + 7, 11).exists());
  at::Tensor view = tensor.slice(0, 1, 2);
  tensor.reset();
  EXPECT_EQ(freed, 0) << "a view holds it";
  EXPECT_TRUE(heap->Find(data + 7, 11).exists());
  view.reset();
  EXPECT_EQ(freed, 1);
  EXPECT_FALSE(heap->Find(data + 7, 11).exists());
  EXPECT_TRUE(alive.expired());
}

TEST(SharedHeapTest, ResolvesItsOwnWithoutMappingItAgain) {
  const auto heap = std::make_shared<SharedHeap>([] {});
  const auto segment = Segment();
  const at::Tensor tensor = heap->MakeTensor(segment, 0, kBytes);
  ASSERT_OK_AND_ASSIGN(
      const SharedHeap::Mapping mapping,
      heap->Resolve(/*owner=*/0, heap->Find(segment->data() + 3, 5), 5));
  EXPECT_EQ(mapping.data, segment->data() + 3);
  EXPECT_EQ(mapping.segment, segment);
}

TEST(SharedHeapTest, MapsAPeersOnceUntilItIsForgotten) {
  const auto heap = std::make_shared<SharedHeap>([] {});
  auto segment = Segment();
  segment->data()[9] = 'x';
  const SharedPlace place = {segment->address(), 9};
  ASSERT_OK_AND_ASSIGN(SharedHeap::Mapping mapping,
                       heap->Resolve(/*owner=*/1, place, 1));
  EXPECT_EQ(*mapping.data, 'x');
  EXPECT_NE(mapping.data, segment->data() + 9);
  // The owner is gone, but the mapping stays.
  segment.reset();
  ASSERT_OK_AND_ASSIGN(const SharedHeap::Mapping again,
                       heap->Resolve(/*owner=*/1, place, 1));
  EXPECT_EQ(again.segment, mapping.segment);

  heap->Forget(0);
  EXPECT_OK(heap->Resolve(/*owner=*/1, place, 1));
  heap->Forget(1);
  EXPECT_EQ(*mapping.data, 'x') << "as long as the segment is held";
  EXPECT_THAT(heap->Resolve(/*owner=*/1, place, 1),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("open")));
}

TEST(SharedHeapTest, RefusesPlacesBeyondASegment) {
  const auto heap = std::make_shared<SharedHeap>([] {});
  const auto segment = Segment();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const struct {
    int64_t offset;
    int64_t bytes;
    bool within;
  } cases[] = {
      {0, 0, true},           {0, kBytes, true},     {kBytes, 0, true},
      {0, kBytes + 1, false}, {1, kBytes, false},    {kBytes + 1, 0, false},
      {-1, 1, false},         {0, -1, false},        {kMost, 1, false},
      {1, kMost, false},      {kMost, kMost, false},
  };
  for (const auto& c : cases) {
    const auto mapping =
        heap->Resolve(/*owner=*/1, {segment->address(), c.offset}, c.bytes);
    if (c.within) {
      EXPECT_OK(mapping);
    } else {
      EXPECT_THAT(mapping, StatusIs(absl::StatusCode::kUnavailable,
                                    HasSubstr("of a segment of 1021")))
          << c.offset << " " << c.bytes;
    }
  }
}

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
