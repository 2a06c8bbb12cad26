#include <cstdint>
#include <cstring>
#include <deque>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/save/saver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

offload::PageMemory Memory(int64_t bytes) {
  return *offload::PageMemory::Allocate(offload::PageAllocator::System(),
                                        bytes);
}

TEST(StagingRingTest, AllOfItAndNothing) {
  StagingRing ring(Memory(100));
  EXPECT_EQ(ring.capacity(), 100);
  for (int i = 0; i < 3; ++i) {
    const auto all = ring.Take(100, Soon());
    ASSERT_OK(all.status());
    EXPECT_EQ(all->size(), 100);
    const auto nothing = ring.Take(0, Soon());
    ASSERT_OK(nothing.status());
    EXPECT_TRUE(nothing->empty());
    ring.GiveBack();
    ring.GiveBack();
  }
}

TEST(StagingRingTest, SpansThatAreTakenDoNotOverlap) {
  StagingRing ring(Memory(64));
  std::deque<absl::Span<char>> taken;
  int64_t held = 0;
  for (int64_t i = 0; i < 500; ++i) {
    const int64_t bytes = i * 7 % 23;
    while (held + bytes > 32) {  // so much fits, whatever is skipped
      held -= static_cast<int64_t>(taken.front().size());
      taken.pop_front();
      ring.GiveBack();
    }
    const auto span = ring.Take(bytes, Soon());
    ASSERT_OK(span.status());
    for (const absl::Span<char> other : taken) {
      EXPECT_TRUE(span->data() + span->size() <= other.data() ||
                  other.data() + other.size() <= span->data());
    }
    taken.push_back(*span);
    held += bytes;
  }
}

TEST(StagingRingTest, WaitsNoLongerThanItMay) {
  StagingRing ring(Memory(10));
  ASSERT_OK(ring.Take(6, Soon()).status());
  EXPECT_THAT(ring.Take(5, absl::Now()).status(),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("6 bytes are still to be written")));
  ring.GiveBack();
  EXPECT_OK(ring.Take(5, Soon()).status());
}

// What does not fit behind the last span fits once there is none.
TEST(StagingRingTest, TheLastThatIsGivenBackLeavesAllOfIt) {
  for (int i = 0; i < 20; ++i) {
    StagingRing ring(Memory(10));
    ASSERT_OK(ring.Take(6, Soon()).status());
    std::thread writer([&] { ring.GiveBack(); });
    EXPECT_OK(ring.Take(10, Soon()).status());
    writer.join();
  }
}

TEST(StagingRingTest, WhoWaitsIsToldWhyItIsClosed) {
  StagingRing ring(Memory(10));
  ASSERT_OK(ring.Take(10, Soon()).status());
  std::thread writer([&] { ring.Close(absl::DataLossError("no disk")); });
  EXPECT_THAT(ring.Take(1, Soon()).status(),
              StatusIs(absl::StatusCode::kDataLoss, "no disk"));
  writer.join();
  ring.GiveBack();
  EXPECT_EQ(ring.Take(1, Soon()).status().code(), absl::StatusCode::kDataLoss);
  ring.Open();
  EXPECT_OK(ring.Take(10, Soon()).status());
}

// What one thread writes the other reads, in order, however often the memory
// comes round.
TEST(StagingRingTest, BytesArriveFromOneThreadAtAnother) {
  StagingRing ring(Memory(97));
  absl::Mutex mutex;
  std::deque<absl::Span<char>> queue;
  constexpr int kSpans = 2000;
  std::thread writer([&] {
    for (int i = 0; i < kSpans; ++i) {
      mutex.LockWhen(absl::Condition(
          +[](std::deque<absl::Span<char>>* q) { return !q->empty(); },
          &queue));
      const absl::Span<char> span = queue.front();
      queue.pop_front();
      mutex.Unlock();
      for (const char c : span) ASSERT_EQ(c, static_cast<char>(i));
      ring.GiveBack();
    }
  });
  for (int i = 0; i < kSpans; ++i) {
    const auto span = ring.Take(i % 41, Soon());
    ASSERT_OK(span.status());
    std::memset(span->data(), i, span->size());
    absl::MutexLock lock(&mutex);
    queue.push_back(*span);
  }
  writer.join();
}

}  // namespace
}  // namespace fsdp::checkpoint
