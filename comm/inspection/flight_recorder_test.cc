#include "comm/inspection/flight_recorder.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/testing/allocations.h"
#include "comm/inspection/peer_records.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::Allocations;
using ::testing::Le;
using ::testing::SizeIs;

using Ticket = FlightRecorder::Ticket;

constexpr int64_t kNow = 1'000'000;

// Records operation `i` from its call to its end; all that is recorded tells
// `i`.
void RecordOne(FlightRecorder& recorder, int group, int64_t i) {
  std::array<char, 24> digits;
  char* const begin = digits.data();
  char* end = begin;
  for (int64_t rest = i; end == begin || rest > 0; rest /= 10) {
    *end++ = static_cast<char>('0' + rest % 10);
  }
  const Ticket ticket = recorder.Begin(
      {OperationKind::kReduceScatter, /*dtype=*/6, group, i,
       absl::string_view(begin, static_cast<size_t>(end - begin))},
      kNow + i);
  recorder.Started(ticket, i);
  recorder.Waits(ticket, kNow + int64_t{2} * i);
  recorder.Ends(ticket, OperationState::kDone, kNow + int64_t{3} * i);
}

// Returns the label that RecordOne() writes.
std::string LabelOf(int64_t i) {
  const std::string forward = absl::StrCat(i);
  return {forward.rbegin(), forward.rend()};
}

class FlightRecorderSizeTest : public ::testing::TestWithParam<int> {};

TEST_P(FlightRecorderSizeTest, KeepsTheLastHundred) {
  const int size = GetParam();
  FlightRecorder recorder;
  const int group = recorder.AddGroup(7);
  for (int i = 0; i < size; ++i) RecordOne(recorder, group, i);
  const RankRecord record = recorder.Read(kNow);
  EXPECT_EQ(record.num_operations, size);
  const int first = size > 100 ? size - 100 : 0;
  ASSERT_THAT(record.operations, SizeIs(size - first));
  for (int i = first; i < size; ++i) {
    const OperationRecord& operation = record.operations[i - first];
    EXPECT_EQ(operation.kind, OperationKind::kReduceScatter);
    EXPECT_EQ(operation.state, OperationState::kDone);
    EXPECT_EQ(operation.dtype, 6);
    EXPECT_EQ(operation.group, 0);
    EXPECT_EQ(operation.call, i);
    EXPECT_EQ(operation.number, i);
    EXPECT_EQ(operation.bytes, i);
    EXPECT_EQ(operation.started_ns, kNow + i);
    EXPECT_EQ(operation.waited_ns, kNow + int64_t{2} * i);
    EXPECT_EQ(operation.ended_ns, kNow + int64_t{3} * i);
    EXPECT_EQ(operation.label, LabelOf(i));
  }
  ASSERT_THAT(record.groups, SizeIs(1));
  EXPECT_EQ(record.groups[0].id, 7);
  EXPECT_EQ(record.groups[0].calls, size);
}

INSTANTIATE_TEST_SUITE_P(Sizes, FlightRecorderSizeTest,
                         ::testing::Values(0, 1, 99, 100, 101, 200, 1234));

TEST(FlightRecorderTest, ShowsHowFarAnOperationIs) {
  FlightRecorder recorder;
  const auto state = [&] { return recorder.Read(kNow).operations[0].state; };
  const Ticket ticket = recorder.Begin({OperationKind::kFence}, 1);
  EXPECT_EQ(state(), OperationState::kStarting);
  EXPECT_EQ(recorder.Read(kNow).operations[0].number, -1);
  recorder.Started(ticket, 5);
  EXPECT_EQ(state(), OperationState::kStarted);
  EXPECT_EQ(recorder.Read(kNow).operations[0].number, 5);
  EXPECT_EQ(recorder.Read(kNow).operations[0].waited_ns, 0);
  recorder.Waits(ticket, 2);
  EXPECT_EQ(state(), OperationState::kWaiting);
  EXPECT_EQ(recorder.Read(kNow).operations[0].ended_ns, 0);
  recorder.Ends(ticket, OperationState::kFailed, 3);
  EXPECT_EQ(state(), OperationState::kFailed);
}

// An operation may end long after a hundred others have begun.
TEST(FlightRecorderTest, WhatIsForgottenChangesNothingWhenItEnds) {
  FlightRecorder recorder;
  const Ticket old = recorder.Begin({OperationKind::kFence}, 1);
  for (int i = 0; i < 100; ++i) RecordOne(recorder, -1, i);
  recorder.Started(old, 77);
  recorder.Waits(old, 77);
  recorder.Ends(old, OperationState::kFailed, 77);
  const RankRecord record = recorder.Read(kNow);
  ASSERT_THAT(record.operations, SizeIs(100));
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(record.operations[i].number, i);
    EXPECT_EQ(record.operations[i].state, OperationState::kDone);
  }
}

TEST(FlightRecorderTest, LongLabelsLoseTheirMiddle) {
  FlightRecorder recorder;
  const std::string label = absl::StrCat(
      std::string(40, 'a'), std::string(9, 'b'), std::string(40, 'c'));
  recorder.Begin({OperationKind::kFence, -1, -1, 0, label}, 1);
  recorder.Begin({OperationKind::kFence, -1, -1, 0, label.substr(0, 64)}, 1);
  recorder.Note(Phase::kForward, label, 0, 1);
  const RankRecord record = recorder.Read(kNow);
  const std::string expected =
      absl::StrCat(std::string(32, 'a'), std::string(32, 'c'));
  EXPECT_EQ(record.operations[0].label, expected);
  EXPECT_EQ(record.operations[1].label, label.substr(0, 64));
  EXPECT_EQ(record.unit, expected);
}

TEST(FlightRecorderTest, NotesThePhase) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.Read(kNow).phase, Phase::kUnknown);
  recorder.Note(Phase::kBackward, "blocks.3", 4096, 17);
  recorder.Note(Phase::kForward, "blocks.4", 8192, 18);
  recorder.Note(Phase::kForward, "blocks", -1, 18);
  const RankRecord record = recorder.Read(kNow);
  EXPECT_EQ(record.phase, Phase::kForward);
  EXPECT_EQ(record.unit, "blocks");
  EXPECT_EQ(record.pool_bytes, 8192);
  EXPECT_EQ(record.phase_ns, 18);
  EXPECT_EQ(record.taken_ns, kNow);
  EXPECT_EQ(record.pid, getpid());
}

TEST(FlightRecorderTest, TellsWhatIsWaitedForUntilItEnds) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.Read(kNow).wait, StoreWait::kNothing);
  recorder.Note(Phase::kBackward, "blocks.3", 4096, 16);
  const uint64_t wait =
      recorder.BeginWait(StoreWait::kRead, "unit blocks.2", 17);
  RankRecord record = recorder.Read(kNow);
  EXPECT_EQ(record.wait, StoreWait::kRead);
  EXPECT_EQ(record.wait_what, "unit blocks.2");
  EXPECT_EQ(record.wait_ns, 17);
  EXPECT_EQ(record.phase, Phase::kBackward);
  EXPECT_EQ(record.unit, "blocks.3");
  recorder.EndWait(wait);
  record = recorder.Read(kNow);
  EXPECT_EQ(record.wait, StoreWait::kNothing);
  EXPECT_EQ(record.wait_what, "");
  EXPECT_EQ(record.phase, Phase::kBackward);
}

TEST(FlightRecorderTest, OfSeveralWaitsTheLastOneIsKnown) {
  FlightRecorder recorder;
  const uint64_t first = recorder.BeginWait(StoreWait::kRead, "a", 1);
  const uint64_t second = recorder.BeginWait(StoreWait::kWrite, "b", 2);
  recorder.EndWait(first);
  EXPECT_EQ(recorder.Read(kNow).wait, StoreWait::kWrite);
  EXPECT_EQ(recorder.Read(kNow).wait_what, "b");
  recorder.EndWait(second);
  EXPECT_EQ(recorder.Read(kNow).wait, StoreWait::kNothing);
  const uint64_t third = recorder.BeginWait(StoreWait::kRoom, "c", 3);
  recorder.EndWait(second);
  recorder.EndWait(0);
  EXPECT_EQ(recorder.Read(kNow).wait, StoreWait::kRoom);
  recorder.EndWait(third);
  EXPECT_EQ(recorder.Read(kNow).wait, StoreWait::kNothing);
}

TEST(FlightRecorderTest, CountsTheCallsOfEachGroup) {
  FlightRecorder recorder;
  for (int i = 0; i < FlightRecorder::kGroups; ++i) {
    EXPECT_EQ(recorder.AddGroup(100 + i), i);
  }
  EXPECT_EQ(recorder.AddGroup(1), -1);
  for (const int group : {31, 0, 31, -1}) RecordOne(recorder, group, 1);
  const RankRecord record = recorder.Read(kNow);
  ASSERT_THAT(record.groups, SizeIs(FlightRecorder::kGroups));
  EXPECT_EQ(record.groups[0].calls, 1);
  EXPECT_EQ(record.groups[1].calls, 0);
  EXPECT_EQ(record.groups[31].calls, 2);
  EXPECT_EQ(record.groups[31].id, 131);
  EXPECT_EQ(record.operations[2].call, 1);
  EXPECT_EQ(record.operations[3].group, -1);
}

TEST(FlightRecorderTest, RecordingAllocatesNothing) {
  FlightRecorder recorder;
  const int group = recorder.AddGroup(1);
  Allocations::Start();
  for (int i = 0; i < 1000; ++i) {
    RecordOne(recorder, group, i);
    recorder.Note(Phase::kForward, "blocks.0.attention.projection", 1, i);
    recorder.EndWait(recorder.BeginWait(
        StoreWait::kRead, "unit blocks.0.attention.projection", i));
  }
  EXPECT_EQ(Allocations::Largest(), 0);
}

// Two ranks' threads write round after round of the ring while another looks.
TEST(FlightRecorderTest, ReadersSeeWholeOperations) {
  constexpr int64_t kEach = 20'000;
  FlightRecorder recorder;
  const int group = recorder.AddGroup(1);
  std::atomic<int> writing{2};
  std::vector<std::thread> writers;
  writers.reserve(2);
  for (int writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&, writer] {
      for (int64_t i = 0; i < kEach; ++i) {
        RecordOne(recorder, group, i * 2 + writer);
        recorder.Note(Phase::kForward, LabelOf(i), i, i);
        recorder.EndWait(recorder.BeginWait(StoreWait::kRead, LabelOf(i), i));
      }
      --writing;
    });
  }
  int64_t seen = 0;
  while (writing > 0 || seen == 0) {
    const RankRecord record = recorder.Read(kNow);
    EXPECT_EQ(record.unit, record.phase == Phase::kUnknown
                               ? ""
                               : LabelOf(record.pool_bytes));
    EXPECT_EQ(record.phase_ns, record.pool_bytes);
    if (record.wait != StoreWait::kNothing) {
      EXPECT_EQ(record.wait_what, LabelOf(record.wait_ns));
    }
    uint64_t last = 0;
    for (const OperationRecord& operation : record.operations) {
      const int64_t i = operation.bytes;
      ASSERT_EQ(operation.label, LabelOf(i));
      ASSERT_EQ(operation.started_ns, kNow + i);
      ASSERT_EQ(operation.number,
                operation.state == OperationState::kStarting ? -1 : i);
      ASSERT_EQ(operation.ended_ns, operation.state == OperationState::kDone
                                        ? kNow + int64_t{3} * i
                                        : 0);
      ASSERT_LT(last, operation.ticket);
      last = operation.ticket;
      ++seen;
    }
  }
  for (std::thread& writer : writers) writer.join();
  const RankRecord record = recorder.Read(kNow);
  EXPECT_EQ(record.num_operations, 2 * kEach);
  EXPECT_EQ(record.groups[0].calls, 2 * kEach);
  EXPECT_EQ(record.wait, StoreWait::kNothing);
}

// Returns the largest record there can be.
RankRecord FullRecord() {
  FlightRecorder recorder;
  for (uint64_t id = 1; id <= FlightRecorder::kGroups; ++id) {
    recorder.AddGroup(id);
  }
  recorder.Note(Phase::kBackward, std::string(200, 'u'), 12345, 99);
  recorder.BeginWait(StoreWait::kWrite, std::string(200, 'w'), 101);
  for (int i = 0; i < 150; ++i) {
    const Ticket ticket = recorder.Begin(
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
  return RecordText(0, seen, FlightRecorder::kSent);
}

TEST(FlightRecorderTest, AMessageHasTheLastOperations) {
  const RankRecord full = FullRecord();
  const std::string bytes = FlightRecorder::Encode(full);
  EXPECT_THAT(bytes, SizeIs(Le(4096)));
  const std::optional<RankRecord> back = FlightRecorder::Decode(bytes);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->pid, full.pid);
  EXPECT_EQ(back->taken_ns, 777);
  EXPECT_EQ(back->pool_bytes, 12345);
  ASSERT_THAT(back->groups, SizeIs(32));
  EXPECT_EQ(back->groups[31].id, 32);
  EXPECT_EQ(back->groups[31].calls, full.groups[31].calls);
  ASSERT_THAT(back->operations, SizeIs(FlightRecorder::kSent));
  EXPECT_EQ(back->operations.back().ticket, 150);
  EXPECT_EQ(back->operations.front().ticket, 150 - FlightRecorder::kSent + 1);
  EXPECT_EQ(back->operations.back().group, 149 % 32);
  EXPECT_EQ(back->operations.back().call, full.operations.back().call);
  EXPECT_EQ(TextOf(*back), TextOf(full));
}

TEST(FlightRecorderTest, AMessageOfAnotherLengthIsRefused) {
  const std::string bytes = FlightRecorder::Encode(FullRecord());
  for (const size_t size : {size_t{0}, size_t{1}, bytes.size() - 1}) {
    EXPECT_FALSE(FlightRecorder::Decode(bytes.substr(0, size)).has_value());
  }
  EXPECT_FALSE(FlightRecorder::Decode(bytes + "x").has_value());
}

void ExpectBounds(const RankRecord& record, size_t operations) {
  EXPECT_THAT(record.operations, SizeIs(Le(operations)));
  EXPECT_THAT(record.groups, SizeIs(Le(FlightRecorder::kGroups)));
  EXPECT_LT(static_cast<int>(record.phase), kNumPhases);
  EXPECT_LT(static_cast<int>(record.wait), kNumStoreWaits);
  EXPECT_THAT(record.wait_what, SizeIs(Le(FlightRecorder::kLabelBytes)));
  EXPECT_THAT(record.unit, SizeIs(Le(FlightRecorder::kLabelBytes)));
  for (const OperationRecord& operation : record.operations) {
    EXPECT_LT(static_cast<int>(operation.kind), kNumOperationKinds);
    EXPECT_LT(static_cast<int>(operation.state), kNumOperationStates);
    EXPECT_LT(operation.group, FlightRecorder::kGroups);
    EXPECT_THAT(operation.label, SizeIs(Le(FlightRecorder::kLabelBytes)));
    for (const unsigned char c : operation.label) EXPECT_GE(c, ' ');
  }
  EXPECT_FALSE(TextOf(record).empty());
}

// Overwrites all of the bytes at first, then ever less.
TEST(FlightRecorderTest, WhatAnotherProcessWritesIsBounded) {
  std::mt19937 random(1);
  const auto spoil = [&](char* bytes, size_t count, int round) {
    for (size_t i = 0; i < count; i += 1 + random() % (1 + round * 10)) {
      bytes[i] = static_cast<char>(random());
    }
  };
  for (int round = 0; round < 200; ++round) {
    FlightRecorder recorder;
    for (int i = 0; i < 150; ++i) RecordOne(recorder, -1, i);
    std::string message = FlightRecorder::Encode(recorder.Read(kNow));
    spoil(recorder.memory(), FlightRecorder::Bytes(), round);
    ExpectBounds(FlightRecorder::Read(recorder.memory(), kNow), 100);
    spoil(message.data(), message.size(), round);
    ExpectBounds(*FlightRecorder::Decode(message), FlightRecorder::kSent);
  }
}

}  // namespace
}  // namespace fsdp::comm
