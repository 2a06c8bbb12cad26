#include "fsdp/memory/buffer_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class BufferPoolTest : public ::testing::Test {
 protected:
  explicit BufferPoolTest(int64_t room = 0)
      : pool_(
            [this](int64_t bytes) -> absl::StatusOr<at::Tensor> {
              if (!failure_.ok()) return failure_;
              allocations_.push_back(bytes);
              return at::empty({bytes}, at::kByte);
            },
            room) {}

  at::Tensor Acquire(int64_t bytes) {
    absl::StatusOr<at::Tensor> buffer = pool_.Acquire(bytes);
    EXPECT_OK(buffer.status());
    return buffer.ok() ? *buffer : at::Tensor();
  }

  std::vector<int64_t> allocations_;
  absl::Status failure_;
  BufferPool pool_;
};

TEST_F(BufferPoolTest, NeverGivesMemoryThatIsInUse) {
  const at::Tensor first = Acquire(100);
  const at::Tensor second = Acquire(100);
  EXPECT_FALSE(second.is_alias_of(first));
  pool_.Release(second);
  const at::Tensor third = Acquire(100);
  EXPECT_TRUE(third.is_alias_of(second));
  EXPECT_THAT(allocations_, ElementsAre(100, 100));
}

TEST_F(BufferPoolTest, ReusesTheSmallestThatFits) {
  const at::Tensor large = Acquire(150);
  const at::Tensor middle = Acquire(120);
  const at::Tensor small = Acquire(90);
  for (const at::Tensor& buffer : {large, middle, small}) {
    pool_.Release(buffer);
  }
  EXPECT_TRUE(Acquire(100).is_alias_of(middle));
  EXPECT_TRUE(Acquire(100).is_alias_of(large));
  EXPECT_THAT(allocations_, ElementsAre(150, 120, 90));
}

TEST_F(BufferPoolTest, DoesNotLendTwiceTheSizeAndMore) {
  const at::Tensor exactly_twice = Acquire(200);
  const at::Tensor more = Acquire(201);
  pool_.Release(exactly_twice);
  pool_.Release(more);
  EXPECT_TRUE(Acquire(100).is_alias_of(exactly_twice));
  EXPECT_FALSE(Acquire(100).is_alias_of(more));
  EXPECT_THAT(allocations_, ElementsAre(200, 201, 100));
}

TEST_F(BufferPoolTest, ServesRequestsForNothing) {
  const at::Tensor nothing = Acquire(0);
  EXPECT_EQ(nothing.nbytes(), 0u);
  pool_.Release(nothing);
  pool_.Release(Acquire(1));
  EXPECT_EQ(Acquire(0).nbytes(), 0u);
  EXPECT_EQ(pool_.stats().in_use_bytes, 0);
}

TEST_F(BufferPoolTest, CountsBytes) {
  const at::Tensor first = Acquire(100);
  const at::Tensor second = Acquire(60);
  EXPECT_EQ(pool_.stats().in_use_bytes, 160);
  pool_.Release(first);
  EXPECT_EQ(pool_.stats().in_use_bytes, 60);
  // Buffers count with their own sizes, not with those of requests.
  const at::Tensor third = Acquire(50);
  EXPECT_EQ(pool_.stats().in_use_bytes, 160);
  EXPECT_EQ(pool_.stats().peak_in_use_bytes, 160);
  EXPECT_EQ(pool_.stats().reserved_bytes, 160);
  pool_.Release(second);
  pool_.Release(third);
  EXPECT_EQ(pool_.stats().in_use_bytes, 0);
  EXPECT_EQ(pool_.stats().reserved_bytes, 160);
}

TEST_F(BufferPoolTest, NeverGivesDiscardedMemoryAgain) {
  const at::Tensor first = Acquire(100);
  pool_.Discard(first);
  EXPECT_EQ(pool_.stats().in_use_bytes, 0);
  EXPECT_EQ(pool_.stats().reserved_bytes, 0);
  EXPECT_EQ(pool_.stats().allocations, 0);
  EXPECT_FALSE(Acquire(100).is_alias_of(first));
  EXPECT_EQ(pool_.stats().allocations, 1);
}

TEST_F(BufferPoolTest, AwaitsAReaderBeforeItGivesTheMemoryAgain) {
  absl::Status read = absl::UnavailableError("a peer is gone");
  int waits = 0;
  const at::Tensor first = Acquire(100);
  pool_.Release(first, [&] {
    ++waits;
    return read;
  });
  EXPECT_EQ(waits, 0);
  EXPECT_THAT(pool_.Acquire(100),
              StatusIs(absl::StatusCode::kUnavailable, "a peer is gone"));
  read = absl::OkStatus();
  EXPECT_TRUE(Acquire(100).is_alias_of(first));
  EXPECT_EQ(waits, 2);
}

TEST_F(BufferPoolTest, AwaitsNoReaderOnceUsesAreForgotten) {
  const at::Tensor first = Acquire(100);
  pool_.Release(first, [] { return absl::InternalError("still waits"); });
  pool_.ForgetUses();
  EXPECT_TRUE(Acquire(100).is_alias_of(first));
}

TEST_F(BufferPoolTest, GivesAdoptedMemory) {
  const at::Tensor first = Acquire(100);
  pool_.Discard(first);
  pool_.Adopt(first, DeviceEvent());
  EXPECT_EQ(pool_.stats().reserved_bytes, 100);
  EXPECT_EQ(pool_.stats().in_use_bytes, 0);
  EXPECT_EQ(pool_.stats().allocations, 1);
  EXPECT_TRUE(Acquire(100).is_alias_of(first));
  EXPECT_EQ(pool_.stats().allocations, 1);
}

TEST_F(BufferPoolTest, FailedAllocationChangesNothing) {
  failure_ = absl::ResourceExhaustedError("no memory");
  EXPECT_THAT(pool_.Acquire(100),
              StatusIs(absl::StatusCode::kResourceExhausted, "no memory"));
  EXPECT_EQ(pool_.stats().in_use_bytes, 0);
  EXPECT_EQ(pool_.stats().reserved_bytes, 0);
  failure_ = absl::OkStatus();
  EXPECT_EQ(Acquire(100).nbytes(), 100u);
}

TEST_F(BufferPoolTest, StepsFromSortedBuffersUseTheSameInTheSameOrder) {
  const at::Tensor memory = at::empty({300}, at::kByte);
  int64_t begin = 300;  // addresses fall
  BufferPool pool([&](int64_t bytes) -> absl::StatusOr<at::Tensor> {
    begin -= bytes;
    return memory.narrow(0, begin, bytes);
  });
  std::vector<at::Tensor> buffers;
  for (int i = 0; i < 3; ++i) buffers.push_back(*pool.Acquire(100));
  std::vector<int> order = {0, 1, 2};
  do {
    for (const int i : order) pool.Release(buffers[i]);
    pool.SortFree();
    for (const at::Tensor& expected : buffers) {
      EXPECT_EQ(pool.Acquire(100)->const_data_ptr(), expected.const_data_ptr());
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

class RoomyPoolTest : public BufferPoolTest {
 protected:
  RoomyPoolTest() : BufferPoolTest(/*room=*/200) {}
};

TEST_F(RoomyPoolTest, BuffersAreNewUntilThereIsNoRoom) {
  const at::Tensor first = Acquire(100);
  pool_.Release(first);
  const at::Tensor second = Acquire(100);
  EXPECT_FALSE(second.is_alias_of(first));
  pool_.Release(second);
  EXPECT_TRUE(Acquire(100).is_alias_of(first));
  EXPECT_TRUE(Acquire(100).is_alias_of(second));
  EXPECT_EQ(pool_.stats().reserved_bytes, 200);
}

TEST_F(RoomyPoolTest, FreeBuffersMakeRoomForOthers) {
  const at::Tensor first = Acquire(20);
  const at::Tensor second = Acquire(20);
  const at::Tensor third = Acquire(20);
  pool_.Release(second);
  pool_.Release(first);
  EXPECT_EQ(Acquire(160).nbytes(), 160u);
  EXPECT_EQ(pool_.stats().reserved_bytes, 200);  // `second` has gone
  EXPECT_TRUE(Acquire(20).is_alias_of(first));
}

TEST_F(RoomyPoolTest, WhatIsNeededAtOnceIsThereWithoutRoom) {
  Acquire(150);
  EXPECT_EQ(Acquire(150).nbytes(), 150u);
  EXPECT_EQ(pool_.stats().reserved_bytes, 300);
}

TEST_F(BufferPoolTest, ReleaseOfMoreThanIsInUseStopsTheProgram) {
  EXPECT_DEATH(pool_.Release(at::empty({1}, at::kByte)), "in_use_bytes");
}

}  // namespace
}  // namespace fsdp
