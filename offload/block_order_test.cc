#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_layout.h"

namespace fsdp::offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct User {
  bool writes = false;
};

class BlockOrderTest : public ::testing::Test {
 protected:
  std::vector<User*> Leave(const User& user, const int& block) {
    std::vector<User*> next;
    order_.Leave(&block, user, next);
    return next;
  }
  bool Enter(User& user, const int& block) {
    return order_.Enter(&block, &user);
  }

  BlockOrder<User> order_;
  int block_ = 0;
  int other_ = 0;
  User read1_, read2_, read3_;
  User write1_{true}, write2_{true};
};

TEST_F(BlockOrderTest, ReadsRunTogether) {
  EXPECT_TRUE(Enter(read1_, block_));
  EXPECT_TRUE(Enter(read2_, block_));
  EXPECT_THAT(Leave(read1_, block_), IsEmpty());
  EXPECT_THAT(Leave(read2_, block_), IsEmpty());
  EXPECT_TRUE(order_.empty());
}

TEST_F(BlockOrderTest, AWriteIsAlone) {
  EXPECT_TRUE(Enter(write1_, block_));
  EXPECT_FALSE(Enter(write2_, block_));
  EXPECT_FALSE(Enter(read1_, block_));
  EXPECT_FALSE(Enter(read2_, block_));
  EXPECT_THAT(Leave(write1_, block_), ElementsAre(&write2_));
  EXPECT_THAT(Leave(write2_, block_), ElementsAre(&read1_, &read2_));
}

TEST_F(BlockOrderTest, AReadDoesNotOvertakeAWriteThatWaits) {
  EXPECT_TRUE(Enter(read1_, block_));
  EXPECT_FALSE(Enter(write1_, block_));
  EXPECT_FALSE(Enter(read2_, block_));
  EXPECT_THAT(Leave(read1_, block_), ElementsAre(&write1_));
  EXPECT_FALSE(Enter(read3_, block_));
  EXPECT_THAT(Leave(write1_, block_), ElementsAre(&read2_, &read3_));
}

TEST_F(BlockOrderTest, AWriteWaitsForAllReads) {
  EXPECT_TRUE(Enter(read1_, block_));
  EXPECT_TRUE(Enter(read2_, block_));
  EXPECT_FALSE(Enter(write1_, block_));
  EXPECT_THAT(Leave(read1_, block_), IsEmpty());
  EXPECT_THAT(Leave(read2_, block_), ElementsAre(&write1_));
}

TEST_F(BlockOrderTest, OtherBlocksDoNotMatter) {
  EXPECT_TRUE(Enter(write1_, block_));
  EXPECT_TRUE(Enter(write2_, other_));
  EXPECT_THAT(Leave(write1_, block_), IsEmpty());
  EXPECT_THAT(Leave(write2_, other_), IsEmpty());
  EXPECT_TRUE(order_.empty());
}

}  // namespace
}  // namespace fsdp::offload
