#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/inspection/peer_records.h"
#include "comm/rank_activity.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kNow = 1000 * kSecond;
constexpr uint64_t kWorld = 1;

OperationRecord Operation(OperationKind kind, uint64_t call,
                          const std::string& label, OperationState state) {
  OperationRecord operation;
  operation.ticket = call + 1;
  operation.kind = kind;
  operation.state = state;
  operation.dtype = static_cast<int8_t>(c10::ScalarType::Float);
  operation.group = 0;
  operation.call = call;
  operation.bytes = 4096;
  operation.label = label;
  operation.started_ns = kNow - 32 * kSecond;
  operation.waited_ns = kNow - 31 * kSecond;
  if (state >= OperationState::kOnDevice) {
    operation.ended_ns = kNow - 30 * kSecond;
  }
  return operation;
}

// Returns a rank whose last call of the world is `last`.
SeenRank Rank(OperationRecord last) {
  SeenRank seen;
  seen.record.emplace();
  seen.record->taken_ns = kNow;
  seen.record->num_operations = last.call + 1;
  seen.record->groups = {{kWorld, last.call + 1}};
  seen.record->operations = {std::move(last)};
  return seen;
}

SeenRank InGather(uint64_t call) {
  return Rank(Operation(OperationKind::kAllGather, call, "blocks.3",
                        OperationState::kWaiting));
}

TEST(RecordTextTest, NamesWhoIsBehindAndInWhat) {
  std::vector<SeenRank> ranks = {InGather(17), InGather(17), InGather(17)};
  ranks.push_back(Rank(Operation(OperationKind::kReduceScatter, 12, "blocks.7",
                                 OperationState::kWaiting)));
  ranks[3].process = "process 4711 is stopped";
  EXPECT_EQ(WaitText(2, ranks[2].record->operations[0], ranks),
            "rank 2 has waited 31 s for all-gather #17 of blocks.3; ranks 0, 1 "
            "are in it; rank 3 is behind by 5 calls: it is in reduce-scatter "
            "#12 of blocks.7 for 31 s; process 4711 is stopped");
}

TEST(RecordTextTest, TellsWhoHasDoneItFromWhoIsUnknown) {
  std::vector<SeenRank> ranks(5);
  ranks[0] = InGather(17);
  ranks[1] = Rank(Operation(OperationKind::kAllGather, 17, "blocks.3",
                            OperationState::kDone));
  ranks[2] = InGather(18);  // 17 is no longer kept
  ranks[3].process = "process 5 has ended";
  EXPECT_EQ(StandingOfOthers(0, {kWorld, 17}, ranks),
            "ranks 1, 2 have finished it; of rank 3: process 5 has ended; "
            "nothing is known of ranks 3, 4");
}

TEST(RecordTextTest, ARankThatHasFailedIsStillInIt) {
  std::vector<SeenRank> ranks = {InGather(17), InGather(17)};
  ranks[1].record->operations[0].state = OperationState::kFailed;
  EXPECT_EQ(StandingOfOthers(0, {kWorld, 17}, ranks), "rank 1 is in it");
}

TEST(RecordTextTest, RanksOfOtherGroupsAreLeftOut) {
  std::vector<SeenRank> ranks = {InGather(17), InGather(17), InGather(17)};
  ranks[1].record->groups[0].id = 99;
  EXPECT_EQ(StandingOfOthers(0, {kWorld, 17}, ranks), "rank 2 is in it");
  ranks[2].record->groups.clear();
  EXPECT_EQ(StandingOfOthers(0, {kWorld, 17}, ranks),
            "no other rank is known to be part of it");
}

TEST(RecordTextTest, TheOneThatIsBehindMostComesFirst) {
  std::vector<SeenRank> ranks;
  for (uint64_t call : {17, 16, 3, 17}) ranks.push_back(InGather(call));
  const std::string text = StandingOfOthers(0, {kWorld, 17}, ranks);
  EXPECT_THAT(text, StartsWith("rank 3 is in it; rank 2 is behind by 14 calls:"
                               " it is in all-gather #3 of"));
  EXPECT_THAT(text, HasSubstr("; rank 1 is behind by 1 call: it is in"));
}

TEST(RecordTextTest, ManyRanksMakeNoLongText) {
  std::vector<SeenRank> ranks(2000, InGather(17));
  std::fill(ranks.begin() + 1000, ranks.end(), InGather(5));
  const std::string text = StandingOfOthers(0, {kWorld, 17}, ranks);
  EXPECT_THAT(text, HasSubstr("15, 16 and 983 more are in it"));
  EXPECT_THAT(text, HasSubstr("rank 1000 is behind by 12 calls"));
  EXPECT_THAT(text, HasSubstr("992 more ranks are behind by less"));
  EXPECT_LT(text.size(), 1500);
  const std::string joined = JoinedText(GroupCall{kWorld, 17}, ranks, 8, 4);
  EXPECT_THAT(joined, HasSubstr("and 1992 more ranks\n"));
  EXPECT_LT(joined.size(), 5000);
}

TEST(RecordTextTest, SaysWhereARankIs) {
  RankRecord record;
  record.taken_ns = kNow;
  EXPECT_EQ(PositionOf(record), "has called nothing yet");
  record.phase = Phase::kForward;
  record.unit = "blocks.2";
  EXPECT_EQ(PositionOf(record), "has called nothing yet (forward of blocks.2)");
  record.operations = {
      Operation(OperationKind::kAllReduce, 4, "loss", OperationState::kDone)};
  record.phase = Phase::kOutside;
  record.unit = "";
  EXPECT_EQ(PositionOf(record),
            "has called nothing since all-reduce #4 of loss, 30 s ago "
            "(outside forward and backward)");
  record.operations[0].state = OperationState::kFailed;
  record.phase = Phase::kCheckpoint;
  record.unit = "saving";
  EXPECT_EQ(PositionOf(record),
            "has failed in all-reduce #4 of loss 30 s ago (checkpoint: "
            "saving)");
  record.phase = Phase::kOutside;
  record.unit = "";
  record.operations[0].state = OperationState::kStarting;
  EXPECT_EQ(
      PositionOf(record),
      "is in all-reduce #4 of loss for 32 s (outside forward and backward)");
}

TEST(RecordTextTest, SaysThatARankIsInTheOptimizersStepOrWaitsForAStore) {
  SeenRank seen = Rank(
      Operation(OperationKind::kAllReduce, 4, "loss", OperationState::kDone));
  RankRecord& record = *seen.record;
  record.phase = Phase::kStep;
  record.phase_ns = kNow - 4 * kSecond;
  EXPECT_THAT(RecordText(1, seen, 0),
              HasSubstr("; the optimizer's step since 4.0 s\n"));
  record.unit = "blocks.3";
  EXPECT_THAT(RecordText(1, seen, 0),
              HasSubstr("; the optimizer's step of blocks.3 since 4.0 s\n"));
  record.wait = StoreWait::kRead;
  record.wait_what = "unit blocks.3 (parameters)";
  record.wait_ns = kNow - 3 * kSecond;
  EXPECT_EQ(PositionOf(record),
            "waits for unit blocks.3 (parameters) to be read from its store "
            "for 3.0 s (the optimizer's step of blocks.3)");
  record.wait = StoreWait::kWrite;
  EXPECT_THAT(PositionOf(record), HasSubstr("to be written to its store"));
  record.wait = StoreWait::kRoom;
  EXPECT_THAT(PositionOf(record), StartsWith("waits for memory for unit"));
}

TEST(RecordTextTest, AParagraphHasTheLastOperations) {
  SeenRank seen = InGather(17);
  seen.process = "process 12 runs";
  seen.record->operations.insert(
      seen.record->operations.begin(),
      {Operation(OperationKind::kAllGather, 15, "old", OperationState::kDone),
       Operation(OperationKind::kAllGather, 16, "blocks.2",
                 OperationState::kDone)});
  seen.record->operations[1].ended_ns =
      seen.record->operations[1].started_ns + 1'230'000;
  EXPECT_EQ(RecordText(1, seen, 2),
            "rank 1 (process 12 runs) is in all-gather #17 of blocks.3 for "
            "31 s, after 18 operations\n"
            "  all-gather #16 of blocks.2, float32, 4096 bytes: done in 1.2 "
            "ms, 31 s ago\n"
            "  all-gather #17 of blocks.3, float32, 4096 bytes: waiting for "
            "31 s\n");
  EXPECT_EQ(RecordText(2, SeenRank(), 2), "rank 2 is not known\n");
}

TEST(RecordTextTest, WhatPeersMakeUpDoesNoHarm) {
  SeenRank seen = InGather(17);
  OperationRecord& operation = seen.record->operations[0];
  operation.dtype = 127;
  operation.group = 31;
  operation.started_ns = INT64_MIN;
  operation.waited_ns = INT64_MAX;
  seen.record->phase_ns = -1;
  EXPECT_EQ(CallOfGroup(*seen.record, operation), std::nullopt);
  EXPECT_THAT(RecordText(0, seen, 5),
              HasSubstr("blocks.3, 4096 bytes: waiting for 0 us"));
}

TEST(RecordTextTest, ThoseThatAreBehindComeFirstInTheJoinedText) {
  std::vector<SeenRank> ranks = {InGather(17), InGather(17), InGather(12)};
  const std::string text = JoinedText(GroupCall{kWorld, 17}, ranks, 2, 1);
  EXPECT_THAT(text, StartsWith("ranks 0, 1 are in it; rank 2 is behind by 5 "));
  EXPECT_LT(text.find("\nrank 2 is in all-gather #12"),
            text.find("\nrank 0 is in all-gather #17"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("\nrank 1 is in")));
  EXPECT_THAT(text, HasSubstr("and 1 more ranks\n"));
}

}  // namespace
}  // namespace fsdp::comm
