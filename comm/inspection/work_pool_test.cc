#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "base/testing/allocations.h"
#include "comm/inspection/inspected_communicator.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::Allocations;

TEST(WorkPoolTest, GivesEachPieceOnceAndThenTheHeaps) {
  const std::shared_ptr<WorkPool> pool = WorkPool::Create();
  std::vector<void*> pieces;
  for (int i = 0; i < WorkPool::kPieces + 5; ++i) {
    pieces.push_back(WorkPool::Take(pool));
    EXPECT_EQ(
        reinterpret_cast<uintptr_t>(pieces.back()) % alignof(std::max_align_t),
        0);
    std::memset(pieces.back(), i, WorkPool::kBytes);
  }
  EXPECT_EQ(pool->num_taken(), WorkPool::kPieces);
  EXPECT_EQ(std::set<void*>(pieces.begin(), pieces.end()).size(),
            pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(pieces[i]);
    for (size_t j = 0; j < WorkPool::kBytes; ++j) ASSERT_EQ(bytes[j], i);
    WorkPool::Return(pieces[i]);
  }
  EXPECT_EQ(pool->num_taken(), 0);
}

TEST(WorkPoolTest, AllocatesNothingWhilePiecesAreLeft) {
  const std::shared_ptr<WorkPool> pool = WorkPool::Create();
  Allocations::Start();
  for (int i = 0; i < 1000; ++i) {
    void* const one = WorkPool::Take(pool);
    void* const other = WorkPool::Take(pool);
    WorkPool::Return(one);
    WorkPool::Return(other);
  }
  EXPECT_EQ(Allocations::Largest(), 0);
}

// A Work may outlive its communicator.
TEST(WorkPoolTest, LivesUntilTheLastPieceIsBack) {
  std::shared_ptr<WorkPool> pool = WorkPool::Create();
  const std::weak_ptr<WorkPool> alive = pool;
  void* const piece = WorkPool::Take(pool);
  pool.reset();
  EXPECT_FALSE(alive.expired());
  WorkPool::Return(piece);
  EXPECT_TRUE(alive.expired());
}

TEST(WorkPoolTest, ThreadsShareIt) {
  const std::shared_ptr<WorkPool> pool = WorkPool::Create();
  std::atomic<int> spoiled{0};
  std::vector<std::thread> threads;
  threads.reserve(3);
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 5000; ++i) {
        auto* const piece = static_cast<int*>(WorkPool::Take(pool));
        *piece = thread;
        std::this_thread::yield();
        if (*piece != thread) ++spoiled;
        WorkPool::Return(piece);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(spoiled, 0);
  EXPECT_EQ(pool->num_taken(), 0);
}

}  // namespace
}  // namespace fsdp::comm
