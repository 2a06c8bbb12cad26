// A rank whose disk stands still: the save fails, and the training goes on.
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "checkpoint/tests/watched_file_system.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kRanks = 3;
constexpr absl::Duration kLong = absl::Seconds(30);

// The disk of one rank may be held.
class StalledDiskTest
    : public ::testing::TestWithParam<std::tuple<int, CommitBy>> {
 protected:
  static int stalled() { return std::get<0>(GetParam()); }

  absl::StatusOr<std::unique_ptr<Checkpointer>> Open(Communicator& world) {
    CheckpointerOptions options;
    options.files = &disk_;
    if (world.rank() == stalled()) options.files = &held_;
    options.commit_by = std::get<1>(GetParam());
    if (options.commit_by == CommitBy::kManifest) {
      options.layout = SaveLayout::kPerRank;
    }
    options.timeout = kLong;
    options.stall_timeout = absl::Seconds(3);
    return Checkpointer::Open("/run", Unowned(world), options);
  }

  static absl::Status Meet(Communicator& world) {
    return comm::Barrier(world, "meet", absl::Now() + kLong);
  }

  SimulatedFileSystem disk_;
  WriteGate gate_;
  WatchedFileSystem held_{disk_,
                          [this](absl::string_view what, const std::string&) {
                            return gate_.Pass(what);
                          }};
};

INSTANTIATE_TEST_SUITE_P(, StalledDiskTest,
                         ::testing::Values(std::tuple(0, CommitBy::kRename),
                                           std::tuple(2, CommitBy::kRename),
                                           std::tuple(2, CommitBy::kManifest)));

std::string Names(int rank) {
  return absl::StrCat("rank ", rank, " has waited for its disk");
}

// All save again, until it works: what was given up ends when the disk is back.
absl::Status SaveInTime(Checkpointer& checkpoints, int64_t step,
                        const TrainingRun& run) {
  const absl::Time deadline = absl::Now() + kLong;
  absl::Status status = checkpoints.Save(step, run);
  while (absl::IsUnavailable(status) && absl::Now() < deadline) {
    status = checkpoints.Save(step, run);
  }
  return status;
}

TEST_P(StalledDiskTest, ASaveFailsOnAllRanksAndTheTrainingGoesOn) {
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, {}, /*seed=*/1));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
    FSDP_RETURN_IF_ERROR(training->Step(0).status());
    FSDP_RETURN_IF_ERROR(Meet(world));
    if (world.rank() == stalled()) gate_.Hold();
    EXPECT_THAT(checkpoints->Save(1, training->AsRun()),
                StatusIs(Code::kDeadlineExceeded, HasSubstr(Names(stalled()))));
    // The others have not waited for it.
    if (world.rank() == 1) gate_.Release();
    FSDP_RETURN_IF_ERROR(training->Step(1).status());
    FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
    FSDP_RETURN_IF_ERROR(SaveInTime(*checkpoints, 1, training->AsRun()));
    EXPECT_THAT(*checkpoints->Steps(), ElementsAre(1));
    return CheckLatest(world, *checkpoints, {}, 1, values);
  }));
}

// Beside the training not even that rank waits.
TEST_P(StalledDiskTest, ASaveBesideTheTraining) {
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, {}, /*seed=*/1));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
    FSDP_RETURN_IF_ERROR(Meet(world));
    if (world.rank() == stalled()) gate_.Hold();
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(1, training->AsRun()));
    FSDP_RETURN_IF_ERROR(training->Step(0).status());
    EXPECT_THAT(checkpoints->Wait(),
                StatusIs(Code::kDeadlineExceeded, HasSubstr(Names(stalled()))));
    FSDP_RETURN_IF_ERROR(training->Step(1).status());
    // The disk does not answer yet.
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(2, training->AsRun()));
    FSDP_RETURN_IF_ERROR(training->Step(2).status());
    EXPECT_THAT(
        checkpoints->Wait(),
        StatusIs(Code::kUnavailable,
                 AllOf(HasSubstr(absl::StrCat("rank ", stalled(), ": ")),
                       HasSubstr("the save of step 1, which was given up"))));
    EXPECT_THAT(*checkpoints->Steps(), ::testing::IsEmpty());
    FSDP_RETURN_IF_ERROR(Meet(world));
    gate_.Release();
    FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
    FSDP_RETURN_IF_ERROR(SaveInTime(*checkpoints, 3, training->AsRun()));
    EXPECT_THAT(*checkpoints->Steps(), ElementsAre(3));
    return CheckLatest(world, *checkpoints, {}, 3, values);
  }));
}

// As where the others have removed what a rank that they gave up writes.
TEST(GivenUpRankTest, SaysWhatHasFailedAndThatTheSaveWasOver) {
  SimulatedFileSystem disk;
  const auto statuses = RunRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, {}, /*seed=*/1));
    bool is_gone = false;
    WatchedFileSystem files(disk, [&](absl::string_view, const std::string&) {
      return is_gone ? absl::NotFoundError("it is gone") : absl::OkStatus();
    });
    CheckpointerOptions options;
    options.files = &files;
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Checkpointer::Open("/run", Unowned(world), options));
    if (world.rank() == 0) return absl::AbortedError("rank 0 has left");
    is_gone = true;
    return checkpoints->Save(1, training->AsRun());
  });
  EXPECT_THAT(statuses[1],
              StatusIs(Code::kNotFound,
                       AllOf(HasSubstr("it is gone; the save was over: "),
                             HasSubstr("rank 0"))));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
