#include "checkpoint/save/ranks.h"

#include <ATen/ops/zeros.h>

#include <limits>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/save/saver.h"
#include "comm/agreement.h"
#include "comm/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;

constexpr int kRanks = 3;
constexpr absl::Duration kLong = absl::Seconds(30);

RoundOptions Options() {
  RoundOptions options;
  options.timeout = kLong;
  options.stall_timeout = kLong;
  options.interval = absl::Milliseconds(1);
  options.what = "saving step 7";
  return options;
}

absl::Status Meet(Communicator& world) {
  return comm::Barrier(world, "meet", absl::Now() + kLong);
}

TEST(RoundsTest, AllHaveActed) {
  std::atomic<int> acted{0};
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    const DiskProgress progress;
    FSDP_RETURN_IF_ERROR(
        ActInRounds(world, Options(), progress, [&] { ++acted; }));
    EXPECT_EQ(acted, kRanks);
    return Meet(world);
  }));
}

// Ranks that are done wait for one whose disk is slow as long as it gets on,
// which is longer than it may stand still.
TEST(RoundsTest, ASlowDiskIsWaitedFor) {
  constexpr absl::Duration kStall = absl::Seconds(2);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    RoundOptions options = Options();
    options.stall_timeout = kStall;
    DiskProgress progress;
    const auto act = [&] {
      if (world.rank() != 1) return;
      const absl::Time end = absl::Now() + 1.5 * kStall;
      while (absl::Now() < end) progress.CameBack(1);
    };
    FSDP_RETURN_IF_ERROR(ActInRounds(world, options, progress, act));
    return Meet(world);
  }));
}

// Whoever has ended does not stand still, however short the time for that is.
TEST(RoundsTest, WhoHasEndedIsNotGivenUp) {
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) {
    RoundOptions options = Options();
    options.stall_timeout = absl::ZeroDuration();
    options.interval = kLong;
    return ActInRounds(world, options, DiskProgress(), [] {});
  }));
}

// One whose disk stands still is given up by all, also by itself, before its
// call has come back; then they are as good as before.
TEST(RoundsTest, ADiskThatStandsStillIsGivenUp) {
  std::atomic<bool> over{false};
  absl::Notification release;
  const auto statuses = RunRanks(kRanks, [&](Communicator& world) {
    RoundOptions options = Options();
    options.stall_timeout = absl::Seconds(1);
    options.all_bytes = 45;
    DiskProgress progress;
    progress.CameBack(12);
    absl::Notification heard;
    options.on_error = [&](const absl::Status& status) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(status));
      EXPECT_TRUE(world.rank() != 1 || !over);
      heard.Notify();
    };
    const auto act = [&] {
      if (world.rank() != 1) return;
      heard.WaitForNotification();
      release.WaitForNotification();
      over = true;
    };
    absl::Status status = ActInRounds(world, options, progress, act);
    // The others do not wait for it.
    if (world.rank() == 0) release.Notify();
    EXPECT_OK(Meet(world));
    EXPECT_OK(ActInRounds(world, Options(), progress, [] {}));
    return status;
  });
  EXPECT_THAT(statuses, ::testing::Each(StatusIs(
                            absl::StatusCode::kDeadlineExceeded,
                            AllOf(HasSubstr("saving step 7: rank 1 has waited"),
                                  HasSubstr("12 of 45 bytes are written")))));
}

// Whoever does not answer is gone, and so is the group.
TEST(RoundsTest, ARankThatIsGone) {
  const auto statuses = RunRanks(kRanks, [&](Communicator& world) {
    if (world.rank() == 1) return absl::CancelledError("gone");
    return ActInRounds(world, Options(), DiskProgress(), [] {});
  });
  for (const int rank : {0, 2}) EXPECT_FALSE(statuses[rank].ok());
}

TEST(RoundsTest, WithoutAThreadItActsFirst) {
  EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    const fsdp::testing::NoThreads none;
    bool acted = false;
    FSDP_RETURN_IF_ERROR(
        ActInRounds(world, Options(), DiskProgress(), [&] { acted = true; }));
    EXPECT_TRUE(acted);
    return absl::OkStatus();
  }));
}

RankReport Full() {
  RankReport report;
  report.status = absl::DataLossError("the disk");
  report.plan = 0x89abcdef;
  report.own_files = {{"ranks/a", 7}, {"", 0}, {"b", int64_t{1} << 40}};
  report.whole_values = 0xfedcba98;
  report.pieces = {{0, 4096, 17, 1},
                   {3, int64_t{5} << 33, kBlockBytes, 0xffffffff},
                   {3, (int64_t{5} << 33) + kBlockBytes, kBlockBytes, 2},
                   {3, (int64_t{5} << 33) + 2 * kBlockBytes, 1, 3},
                   {4, 3 * kBlockBytes, kBlockBytes, 4},
                   {5, 4 * kBlockBytes, kBlockBytes, 5},
                   {5, 6 * kBlockBytes, kBlockBytes, 6},
                   {5, 8 * kBlockBytes - 1, 1, 7}};
  return report;
}

// What Encode() makes of a report, with lists of its own at the end.
std::string EncodedWith(const std::vector<int64_t>& sizes,
                        const std::vector<int64_t>& places,
                        const std::vector<uint32_t>& sums) {
  // Without what is replaced: the lengths of three empty lists.
  std::string bytes = Encode(RankReport());
  bytes.resize(bytes.size() - 3 * sizeof(uint64_t));
  const auto add = [&bytes](const void* values, uint64_t count, size_t size) {
    bytes.append(reinterpret_cast<const char*>(&count), sizeof(count));
    bytes.append(static_cast<const char*>(values), count * size);
  };
  add(sizes.data(), sizes.size(), sizeof(int64_t));
  for (size_t i = 0; i < sizes.size(); ++i) add("name", 4, 1);
  add(places.data(), places.size(), sizeof(int64_t));
  add(sums.data(), sums.size(), sizeof(uint32_t));
  return bytes;
}

TEST(RankReportTest, ComesBack) {
  for (const RankReport& report : {Full(), RankReport()}) {
    const absl::StatusOr<RankReport> back = Decode(Encode(report));
    ASSERT_OK(back.status());
    EXPECT_EQ(back->status, report.status);
    EXPECT_EQ(back->plan, report.plan);
    ASSERT_EQ(back->own_files.size(), report.own_files.size());
    for (size_t i = 0; i < report.own_files.size(); ++i) {
      EXPECT_EQ(back->own_files[i].name, report.own_files[i].name);
      EXPECT_EQ(back->own_files[i].bytes, report.own_files[i].bytes);
    }
    EXPECT_EQ(back->whole_values, report.whole_values);
    EXPECT_EQ(back->pieces, report.pieces);
  }
}

TEST(RankReportTest, WhatIsCutOffOrTooLongIsNone) {
  const std::string bytes = Encode(Full());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(Decode(bytes.substr(0, size)).status().code(),
              absl::StatusCode::kInternal)
        << size;
  }
  EXPECT_FALSE(Decode(bytes + "x").ok());
  EXPECT_FALSE(Decode(std::string(64, '\xff')).ok());
}

TEST(RankReportTest, BlocksTakeFourBytes) {
  RankReport report;
  const size_t empty = Encode(report).size();
  for (int64_t i = 0; i < 1000; ++i) {
    report.pieces.push_back({2, i * kBlockBytes, kBlockBytes, 7});
  }
  EXPECT_EQ(Encode(report).size(),
            empty + size_t{4} * 1000 + 3 * sizeof(int64_t));
}

TEST(RankReportTest, WhatNobodyEncodes) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  struct Case {
    std::vector<int64_t> sizes;
    std::vector<int64_t> places;
    std::vector<uint32_t> sums;
  };
  const std::vector<Case> bad = {
      {{-1}, {}, {}},                                       // a negative size
      {{}, {0, 0}, {1}},                                    // half a place
      {{}, {0, 0, 0, 0}, {1}},                              // one and a third
      {{}, {-1, 0, 1}, {1}},                                // negative
      {{}, {0, -kBlockBytes, kBlockBytes}, {1}},            // negative
      {{}, {0, 0, -kBlockBytes}, {1}},                      // negative
      {{}, {0, 0, 0}, {}},                                  // empty
      {{}, {0, kMax, 1}, {1}},                              // too far
      {{}, {0, 1, kMax}, {1}},                              // too long
      {{}, {0, 0, kMax / kBlockBytes * kBlockBytes}, {1}},  // too many blocks
      {{}, {0, 0, 2 * kBlockBytes}, {1}},                   // one too many
      {{}, {0, 0, kBlockBytes}, {1, 2}},                    // a sum too many
      {{}, {}, {1}}};                                       // of nothing
  for (size_t i = 0; i < bad.size(); ++i) {
    const Case& one = bad[i];
    EXPECT_EQ(
        Decode(EncodedWith(one.sizes, one.places, one.sums)).status().code(),
        absl::StatusCode::kInternal)
        << i;
  }
  EXPECT_OK(Decode(EncodedWith({5}, {0, 0, 2 * kBlockBytes}, {1, 2})));
}

// Any byte that is changed gives a report or an error.
TEST(RankReportTest, ChangedBytes) {
  const std::string bytes = Encode(Full());
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const int change : {1, 0x80, 0xff}) {
      std::string other = bytes;
      other[i] = static_cast<char>(other[i] ^ change);
      const absl::StatusOr<RankReport> back = Decode(other);
      EXPECT_TRUE(!back.ok() || back->pieces.size() <= bytes.size());
    }
  }
}

TEST(RankReportTest, TheLowestErrorCounts) {
  std::vector<RankReport> reports(4);
  EXPECT_OK(CheckReports(reports));
  reports[3].status = absl::AbortedError("late");
  reports[2].status = absl::ResourceExhaustedError("full");
  EXPECT_THAT(CheckReports(reports),
              StatusIs(absl::StatusCode::kResourceExhausted, "rank 2: full"));
  EXPECT_THAT(CheckReports({Full()}),
              StatusIs(absl::StatusCode::kDataLoss, "the disk"));
}

// Two ranks write "m" together, and each its own.
std::vector<RankReport> OfTwoRanks() {
  std::vector<RankReport> reports(2);
  reports[0].own_files = {{"a", 1}, {"b", 2}};
  reports[0].pieces = {{0, 0, 3, 1}, {1, 0, 1, 2}, {2, 0, 2, 3}};
  reports[1].own_files = {{"c", 4}};
  reports[1].pieces = {{0, 3, 1, 5}, {1, 0, 4, 4}, {0, 4, 1, 6}};
  return reports;
}

TEST(RankReportTest, ReportsMakeAllFiles) {
  std::vector<RankReport> reports = OfTwoRanks();
  ASSERT_OK_AND_ASSIGN(const auto files,
                       CombineReports({{"m", 5}}, absl::MakeSpan(reports)));
  EXPECT_THAT(files, ElementsAre(Key("a"), Key("b"), Key("c"), Key("m")));
  EXPECT_EQ(files.at("b"), (FileSums{2, 3, {3}}));
  EXPECT_EQ(files.at("c"), (FileSums{4, 4, {4}}));
  EXPECT_EQ(files.at("m").bytes, 5);
}

TEST(RankReportTest, ReportsThatMakeNoFiles) {
  const auto combine = [](std::vector<RankReport> reports) {
    return CombineReports({{"m", 5}}, absl::MakeSpan(reports)).status();
  };
  std::vector<RankReport> twice = OfTwoRanks();
  twice[1].own_files[0].name = "b";
  EXPECT_THAT(combine(twice),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("several ranks have written a b")));
  std::vector<RankReport> beyond = OfTwoRanks();
  beyond[1].pieces[0].file = 2;
  EXPECT_THAT(combine(beyond),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("file 2, where there are 2")));
  std::vector<RankReport> missing = OfTwoRanks();
  missing[1].pieces.pop_back();
  EXPECT_THAT(combine(missing), StatusIs(absl::StatusCode::kInternal,
                                         HasSubstr("checksums of m: nobody")));
}

offload::PageMemory Memory(int64_t bytes) {
  return *offload::PageMemory::Allocate(offload::PageAllocator::System(),
                                        bytes);
}

// Ranges of `bytes` each.
SavePlan PlanOf(int ranges, int64_t bytes) {
  SavePlan plan;
  for (int i = 0; i < ranges; ++i) {
    plan.ranges.push_back({{0, i * bytes, bytes},
                           WholeRange("w", at::zeros({bytes}, at::kByte))});
  }
  return plan;
}

TEST(StagingRingTest, WaitsNoLongerThanItMay) {
  StagingRing ring(Memory(10));
  EXPECT_EQ(ring.capacity(), 10);
  for (int i = 0; i < 3; ++i) {
    EXPECT_OK(ring.Stage(PlanOf(2, 5), kLong, "save step 6"));
    ring.Open();
  }
  EXPECT_THAT(ring.Stage(PlanOf(3, 4), absl::ZeroDuration(), "save step 7"),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("save step 7: waiting for the disk"),
                             HasSubstr("10 bytes are still to be written"))));
}

TEST(StagingRingTest, WhoWaitsIsToldWhyItIsClosed) {
  StagingRing ring(Memory(10));
  std::thread writer([&] { ring.Close(absl::DataLossError("no disk")); });
  EXPECT_THAT(ring.Stage(PlanOf(3, 4), kLong, "save step 7"),
              StatusIs(absl::StatusCode::kDataLoss, "no disk"));
  writer.join();
  ring.Open();
  EXPECT_OK(ring.Stage(PlanOf(1, 10), kLong, "save step 8"));
}

}  // namespace
}  // namespace fsdp::checkpoint
