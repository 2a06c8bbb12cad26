#include <cstdint>
#include <optional>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/testing/allocations.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/peer_records.h"
#include "comm/inspection/record_text.h"
#include "comm/rank_activity.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::Allocations;
using ::testing::Le;
using ::testing::SizeIs;

// The largest that there is.
RankRecord FullRecord() {
  FlightRecorder recorder;
  for (uint64_t id = 1; id <= FlightRecorder::kGroups; ++id) {
    recorder.AddGroup(id);
  }
  recorder.Note(Phase::kBackward, std::string(200, 'u'), 12345, 99);
  recorder.BeginWait(StoreWait::kWrite, std::string(200, 'w'), 101);
  for (int i = 0; i < 150; ++i) {
    const FlightRecorder::Ticket ticket = recorder.Begin(
        {OperationKind::kAllToAll, 6, i % 32, i, std::string(200, 'b')}, i);
    recorder.Started(ticket, i + 1000);
    recorder.Waits(ticket, i + 1);
    recorder.Ends(ticket, OperationState::kFailed, i + 2);
  }
  return recorder.Read(777);
}

std::string TextOf(const RankRecord& record) {
  SeenRank seen;
  seen.record = record;
  return RecordText(0, seen, kSentOperations);
}

TEST(RecordCodecTest, AFullRecordFitsAndComesBack) {
  const RankRecord full = FullRecord();
  const std::string bytes = EncodeRecord(full);
  EXPECT_THAT(bytes, SizeIs(Le(kMaxEncodedBytes)));
  const std::optional<RankRecord> back = DecodeRecord(bytes);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->pid, full.pid);
  EXPECT_EQ(back->taken_ns, 777);
  EXPECT_EQ(back->phase, Phase::kBackward);
  EXPECT_EQ(back->unit, full.unit);
  EXPECT_EQ(back->phase_ns, 99);
  EXPECT_EQ(back->pool_bytes, 12345);
  EXPECT_EQ(back->wait, StoreWait::kWrite);
  EXPECT_EQ(back->wait_what, full.wait_what);
  EXPECT_EQ(back->wait_ns, 101);
  EXPECT_EQ(back->num_operations, 150);
  ASSERT_THAT(back->groups, SizeIs(32));
  EXPECT_EQ(back->groups[31].id, 32);
  EXPECT_EQ(back->groups[31].calls, full.groups[31].calls);
  ASSERT_THAT(back->operations, SizeIs(kSentOperations));
  EXPECT_EQ(back->operations.back().ticket, 150);
  EXPECT_EQ(back->operations.front().ticket, 150 - kSentOperations + 1);
  EXPECT_EQ(back->operations.back().group, 149 % 32);
  EXPECT_EQ(back->operations.back().call, full.operations.back().call);
  EXPECT_EQ(TextOf(*back), TextOf(full));
}

TEST(RecordCodecTest, AnEmptyRecordComesBack) {
  const std::optional<RankRecord> back =
      DecodeRecord(EncodeRecord(RankRecord()));
  ASSERT_TRUE(back.has_value());
  EXPECT_THAT(back->operations, SizeIs(0));
}

TEST(RecordCodecTest, WhatIsTooShortOrTooLongIsRefused) {
  const std::string bytes = EncodeRecord(FullRecord());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeRecord(bytes.substr(0, size)).has_value()) << size;
  }
  EXPECT_FALSE(DecodeRecord(bytes + "x").has_value());
  Allocations::Start();
  EXPECT_FALSE(
      DecodeRecord(std::string(kMaxEncodedBytes + 1, '\1')).has_value());
  EXPECT_THAT(Allocations::Largest(), Le(2 * kMaxEncodedBytes));
}

TEST(RecordCodecTest, OtherBytesGiveNothingOrWhatIsBounded) {
  std::mt19937 random(1);
  const std::string bytes = EncodeRecord(FullRecord());
  int refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string wrong = bytes;
    for (int i = 0; i < 1 + round % 5; ++i) {
      wrong[random() % wrong.size()] = static_cast<char>(random());
    }
    const std::optional<RankRecord> record = DecodeRecord(wrong);
    if (!record) {
      ++refused;
      continue;
    }
    EXPECT_LT(static_cast<int>(record->phase), kNumPhases);
    EXPECT_LT(static_cast<int>(record->wait), kNumStoreWaits);
    EXPECT_THAT(record->operations, SizeIs(Le(kSentOperations)));
    for (const OperationRecord& operation : record->operations) {
      EXPECT_LT(static_cast<int>(operation.kind), kNumOperationKinds);
      EXPECT_LT(static_cast<int>(operation.state), kNumOperationStates);
      EXPECT_GE(operation.group, -1);
      for (const char c : operation.label) EXPECT_FALSE(c >= 0 && c < ' ');
    }
    EXPECT_FALSE(TextOf(*record).empty());
  }
  EXPECT_GT(refused, 50);
  EXPECT_LT(refused, 4950);
}

}  // namespace
}  // namespace fsdp::comm
