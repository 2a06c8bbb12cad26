#include "checkpoint/save/rounds.h"

#include <atomic>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
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
using ::testing::HasSubstr;

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
    const absl::Status status = ActInRounds(world, options, progress, act);
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

}  // namespace
}  // namespace fsdp::checkpoint
