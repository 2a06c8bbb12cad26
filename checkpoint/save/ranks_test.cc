#include "checkpoint/save/ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <thread>

#include "absl/synchronization/notification.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/save/saver.h"
#include "comm/agreement.h"
#include "comm/testing/run_ranks.h"
#include "flat_param/layout.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::ParameterSpec;
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
  RankReport negative = Full();
  negative.own_files[0].bytes = -1;
  EXPECT_FALSE(Decode(Encode(negative)).ok());
  EXPECT_FALSE(Decode(std::string(64, '\xff')).ok());
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
  for (const FilePiece& piece :
       {FilePiece{-1, 0, 1, 1},
        {0, -1, 1, 1},
        {0, 5, -1, 1},
        {0, std::numeric_limits<int64_t>::max(), 1, 1}}) {
    std::vector<RankReport> none = OfTwoRanks();
    none[0].pieces.push_back(piece);
    EXPECT_THAT(combine(none),
                StatusIs(absl::StatusCode::kInternal, HasSubstr("checksums")));
  }
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
  EXPECT_OK(StagingRing(Memory(10)).Stage(PlanOf(2, 5), kLong, "save step 6"));
  StagingRing ring(Memory(10));
  EXPECT_EQ(ring.capacity(), 10);
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
}

// Adds the parts of `unit` that `rank` has, without values.
void AddParts(const FlatLayout& unit, int rank, TensorGroup* group) {
  const auto options = at::TensorOptions().device(at::kMeta);
  for (int i = 0; i < unit.num_parameters(); ++i) {
    const ParameterSpec& parameter = unit.parameter(i);
    const flat_param::Slice part = unit.InParameter(i, rank);
    group->parts.push_back({parameter.name, parameter.sizes, parameter.strides,
                            part.begin, at::empty({part.numel()}, options)});
  }
}

// docs/guide/saving_and_loading.md has these numbers.
TEST(PlanTest, ThreeRanksWriteTheBytesThatTheGuideSays) {
  ASSERT_OK_AND_ASSIGN(const FlatLayout unit,
                       FlatLayout::Create({{"a", {10}, {1}}, {"b", {7}, {1}}},
                                          sizeof(float), /*world_size=*/3));
  const std::vector<std::pair<int64_t, int64_t>> expected[] = {
      {{4096, 4128}}, {{4128, 4136}, {4136, 4152}}, {{4152, 4164}}};
  for (int rank = 0; rank < 3; ++rank) {
    TensorGroup model;
    model.stem = "model";
    AddParts(unit, rank, &model);
    ASSERT_OK_AND_ASSIGN(const SavePlan plan,
                         PlanSave({model}, /*max_file_bytes=*/5'000'000'000));
    std::vector<std::pair<int64_t, int64_t>> written;
    for (const SaveRange& range : plan.ranges) {
      written.emplace_back(range.offset, range.offset + range.bytes);
    }
    EXPECT_EQ(written, expected[rank]) << rank;
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
