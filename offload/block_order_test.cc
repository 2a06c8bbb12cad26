// The order of what is done to a block, and a queue that cannot be.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_engine.h"
#include "offload/system_calls.h"

namespace fsdp::offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(UringQueueTest, SaysWhyTheKernelRefuses) {
  const auto queue =
      SystemCalls::Real().MakeQueue(QueueKind::kIoUring, 0, 1 << 20);
  ASSERT_FALSE(queue.ok());
  EXPECT_EQ(queue.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(queue.status().message()),
              ::testing::HasSubstr("io_uring refused: "));
}

class BlockOrderTest : public ::testing::Test {
 protected:
  BlockOrderTest() {
    for (Piece* piece : {&read1_, &read2_, &read3_, &write1_, &write2_}) {
      piece->block = &block_;
    }
    write1_.writes = write2_.writes = true;
  }

  bool Enter(Piece& piece) { return order_.Enter(&piece); }
  std::vector<Piece*> Leave(const Piece& piece) {
    std::vector<Piece*> next;
    order_.Leave(piece, next);
    return next;
  }

  BlockOrder order_;
  Block block_;
  Block other_;
  Piece read1_, read2_, read3_, write1_, write2_;
};

TEST_F(BlockOrderTest, ReadsRunTogether) {
  EXPECT_TRUE(Enter(read1_));
  EXPECT_TRUE(Enter(read2_));
  EXPECT_THAT(Leave(read1_), IsEmpty());
  EXPECT_THAT(Leave(read2_), IsEmpty());
  EXPECT_TRUE(order_.empty());
}

TEST_F(BlockOrderTest, AWriteIsAlone) {
  EXPECT_TRUE(Enter(write1_));
  EXPECT_FALSE(Enter(write2_));
  EXPECT_FALSE(Enter(read1_));
  EXPECT_FALSE(Enter(read2_));
  EXPECT_THAT(Leave(write1_), ElementsAre(&write2_));
  EXPECT_THAT(Leave(write2_), ElementsAre(&read1_, &read2_));
}

TEST_F(BlockOrderTest, AReadDoesNotOvertakeAWriteThatWaits) {
  EXPECT_TRUE(Enter(read1_));
  EXPECT_FALSE(Enter(write1_));
  EXPECT_FALSE(Enter(read2_));
  EXPECT_THAT(Leave(read1_), ElementsAre(&write1_));
  EXPECT_FALSE(Enter(read3_));
  EXPECT_THAT(Leave(write1_), ElementsAre(&read2_, &read3_));
}

TEST_F(BlockOrderTest, AWriteWaitsForAllReads) {
  EXPECT_TRUE(Enter(read1_));
  EXPECT_TRUE(Enter(read2_));
  EXPECT_FALSE(Enter(write1_));
  EXPECT_THAT(Leave(read1_), IsEmpty());
  EXPECT_THAT(Leave(read2_), ElementsAre(&write1_));
}

TEST_F(BlockOrderTest, OtherBlocksDoNotMatter) {
  write2_.block = &other_;
  EXPECT_TRUE(Enter(write1_));
  EXPECT_TRUE(Enter(write2_));
  EXPECT_THAT(Leave(write1_), IsEmpty());
  EXPECT_THAT(Leave(write2_), IsEmpty());
  EXPECT_TRUE(order_.empty());
}

}  // namespace
}  // namespace fsdp::offload
