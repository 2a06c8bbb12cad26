#include "fsdp/schedule/testing/race_detector.h"

#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

TEST(RaceDetectorTest, ARanksOwnAccessesAreInItsOrder) {
  RaceDetector ranks(2);
  const int cell = ranks.AddCell();
  EXPECT_TRUE(ranks.Write(0, cell, 7).ordered());
  const RaceDetector::Access read = ranks.Read(0, cell);
  EXPECT_TRUE(read.ordered());
  EXPECT_EQ(read.value, 7);
  EXPECT_TRUE(ranks.Write(0, cell, 8).ordered());
}

TEST(RaceDetectorTest, AllHaveSeenWhatACellHoldsAtFirst) {
  RaceDetector ranks(3);
  const int cell = ranks.AddCell();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(ranks.Read(rank, cell).ordered());
    EXPECT_EQ(ranks.Read(rank, cell).value, 0);
  }
}

TEST(RaceDetectorTest, AReadOfAnothersWriteRaces) {
  RaceDetector ranks(3);
  const int cell = ranks.AddCell();
  ranks.Write(1, cell, 7);
  EXPECT_EQ(ranks.Read(0, cell).other_rank, 1);
}

TEST(RaceDetectorTest, AWriteOfWhatAnotherReadsRaces) {
  RaceDetector ranks(3);
  const int cell = ranks.AddCell();
  ranks.Read(2, cell);
  EXPECT_EQ(ranks.Write(0, cell, 7).other_rank, 2);
}

TEST(RaceDetectorTest, TwoWritesRace) {
  RaceDetector ranks(2);
  const int cell = ranks.AddCell();
  ranks.Write(0, cell, 7);
  EXPECT_EQ(ranks.Write(1, cell, 8).other_rank, 0);
}

TEST(RaceDetectorTest, ReadsDoNotRace) {
  RaceDetector ranks(2);
  const int cell = ranks.AddCell();
  EXPECT_TRUE(ranks.Read(0, cell).ordered());
  EXPECT_TRUE(ranks.Read(1, cell).ordered());
}

TEST(RaceDetectorTest, AcquireFollowsWhatHasBeenReleasedAndNothingLater) {
  RaceDetector ranks(2);
  const int before = ranks.AddCell();
  const int after = ranks.AddCell();
  ranks.Write(0, before, 1);
  const RaceDetector::Clock clock = ranks.Release(0);
  ranks.Write(0, after, 1);
  ranks.Acquire(1, clock);
  EXPECT_TRUE(ranks.Read(1, before).ordered());
  EXPECT_FALSE(ranks.Read(1, after).ordered());
}

TEST(RaceDetectorTest, OrderIsPassedOnByThirds) {
  RaceDetector ranks(3);
  const int cell = ranks.AddCell();
  ranks.Write(0, cell, 1);
  ranks.Acquire(1, ranks.Release(0));
  ranks.Acquire(2, ranks.Release(1));
  EXPECT_TRUE(ranks.Read(2, cell).ordered());
  // Rank 0 has not synchronized with them.
  EXPECT_EQ(ranks.Write(0, cell, 2).other_rank, 2);
}

TEST(RaceDetectorTest, ABarrierOrdersAllBeforeAllAfter) {
  RaceDetector ranks(3);
  const int cell = ranks.AddCell();
  ranks.Write(0, cell, 1);
  ranks.Barrier();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(ranks.Read(rank, cell).ordered());
  }
  ranks.Barrier();
  EXPECT_TRUE(ranks.Write(2, cell, 2).ordered());
  EXPECT_FALSE(ranks.Read(0, cell).ordered());
}

TEST(RaceDetectorTest, ForgottenReadsRaceWithNothing) {
  RaceDetector ranks(2);
  const int cell = ranks.AddCell();
  ranks.Read(1, cell);
  ranks.ForgetReads();
  EXPECT_TRUE(ranks.Write(0, cell, 1).ordered());
  EXPECT_FALSE(ranks.Read(1, cell).ordered());
}

}  // namespace
}  // namespace fsdp::testing
