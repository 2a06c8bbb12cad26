// What goes on beside a save that is under way.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "checkpoint/tests/watched_file_system.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint::testing {
namespace {

using Code = absl::StatusCode;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kRoot[] = "/run";
constexpr int kRanks = 2;

// A disk whose writes the test holds.
class AsyncTest : public ::testing::Test {
 protected:
  CheckpointerOptions OptionsOf(int64_t staging_bytes = int64_t{1} << 20) {
    CheckpointerOptions options;
    options.files = &files_;
    options.staging_bytes = staging_bytes;
    options.timeout = absl::Seconds(30);
    return options;
  }

  absl::StatusOr<std::unique_ptr<Checkpointer>> Open(
      Communicator& world, const CheckpointerOptions& options) {
    return Checkpointer::Open(kRoot, Unowned(world), options);
  }

  SimulatedFileSystem disk_;
  FaultyFileSystem faulty_{disk_};
  WriteGate gate_;
  WatchedFileSystem files_{faulty_,
                           [this](absl::string_view what, const std::string&) {
                             return gate_.Pass(what);
                           }};
};

// Of each rank: rising, up to all that it writes, which is as much as ranks'
// files have together.
TEST_F(AsyncTest, ProgressOfEachRank) {
  std::vector<std::vector<std::pair<int64_t, int64_t>>> calls(size_t{2} *
                                                              kRanks);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training, ShardedTraining::Make(world));
    FSDP_RETURN_IF_ERROR(training->Step(0).status());
    CheckpointerOptions options = OptionsOf();
    auto* mine = &calls[world.rank()];
    options.progress = [&mine](int64_t done, int64_t all) {
      mine->emplace_back(done, all);
    };
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world, options));
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
    mine = &calls[kRanks + world.rank()];
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(2, training->AsRun()));
    return checkpoints->Wait();
  }));
  const auto manifest = ReadManifest(disk_, absl::StrCat(kRoot, "/step-1"));
  ASSERT_OK(manifest);
  int64_t written = 0;
  for (const auto& [name, sums] : manifest->files) written += sums.bytes;
  for (const int save : {0, kRanks}) {
    int64_t sum = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      int64_t before = 0;
      for (const auto& [done, all] : calls[save + rank]) {
        EXPECT_GT(done, before);
        EXPECT_LE(done, all);
        before = done;
      }
      ASSERT_FALSE(calls[save + rank].empty());
      EXPECT_EQ(before, calls[save + rank].back().second);
      sum += before;
    }
    EXPECT_EQ(sum, written);
  }
}

TEST_F(AsyncTest, TheErrorIsThatOfTheNextCallOnce) {
  using Call = std::function<absl::Status(Checkpointer&, const TrainingRun&)>;
  const std::vector<Call> calls = {
      [](Checkpointer& c, const TrainingRun& run) { return c.Save(2, run); },
      [](Checkpointer& c, const TrainingRun& run) {
        return c.SaveAsync(2, run);
      },
      [](Checkpointer& c, const TrainingRun&) { return c.Wait(); }};
  for (const Call& call : calls) {
    EXPECT_OK(RemoveTree(disk_, kRoot));
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const auto training, ShardedTraining::Make(world));
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world, OptionsOf()));
      FSDP_RETURN_IF_ERROR(Meet(world));
      if (world.rank() == 0) {
        faulty_.FailCall(faulty_.calls() + 3, ENOSPC, /*for_good=*/true);
      }
      FSDP_RETURN_IF_ERROR(Meet(world));
      FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(1, training->AsRun()));
      const absl::Status failed = call(*checkpoints, training->AsRun());
      FSDP_RETURN_IF_ERROR(Meet(world));
      faulty_.FailCall(-1, 0, false);
      FSDP_RETURN_IF_ERROR(Meet(world));
      if (failed.code() != absl::StatusCode::kResourceExhausted) {
        return absl::InternalError(failed.ToString());
      }
      // Nothing was begun, and nothing of the error is left.
      EXPECT_THAT(*checkpoints->Steps(), IsEmpty());
      FSDP_RETURN_IF_ERROR(checkpoints->Wait());
      FSDP_RETURN_IF_ERROR(checkpoints->Save(2, training->AsRun()));
      EXPECT_THAT(*checkpoints->Steps(), ElementsAre(2));
      return absl::OkStatus();
    }));
  }
}

TEST_F(AsyncTest, DestroyedWhileASaveIsUnderWay) {
  gate_.Hold();
  std::thread disk([&] {
    gate_.AwaitHeld();
    gate_.Release();
  });
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    Values values;
    {
      FSDP_ASSIGN_OR_RETURN(const auto training, ShardedTraining::Make(world));
      FSDP_ASSIGN_OR_RETURN(values, training->Gather());
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world, OptionsOf()));
      FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(1, training->AsRun()));
    }
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world, OptionsOf()));
    return CheckLatest(world, *checkpoints, {}, 1, values);
  }));
  disk.join();
}

// The model's ranks are gone for good, and the save is what it was or whole.
TEST_F(AsyncTest, AnAbortedCommunicator) {
  for (const bool async : {false, true}) {
    SCOPED_TRACE(async);
    EXPECT_OK(RemoveTree(disk_, kRoot));
    Values expected;
    const absl::Time begin = absl::Now();
    RunRanks(2, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const auto training, ShardedTraining::Make(world));
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world, OptionsOf()));
      FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
      FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
      if (world.rank() == 0) expected = values;
      FSDP_RETURN_IF_ERROR(Meet(world));
      if (world.rank() == 0) gate_.Hold();
      FSDP_RETURN_IF_ERROR(Meet(world));
      std::thread breaker([&] {
        if (world.rank() != 1) return;
        gate_.AwaitHeld();
        world.Abort(absl::AbortedError("the test"));
        gate_.Release();
      });
      absl::Status status = async ? checkpoints->SaveAsync(2, training->AsRun())
                                  : checkpoints->Save(2, training->AsRun());
      status.Update(checkpoints->Wait());
      breaker.join();
      return status;
    });
    EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
    EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world, OptionsOf()));
      FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> steps,
                            checkpoints->Steps());
      return CheckLatest(world, *checkpoints, {}, steps.back(), expected);
    }));
  }
}

// Its call ends before the others have written. They would wait for it in the
// next collective of the training.
TEST_F(AsyncTest, ARankThatCannotBeginDoesNotWaitForTheOthers) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training, ShardedTraining::Make(world));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Open(world, OptionsOf(/*staging_bytes=*/100)));
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
    FSDP_RETURN_IF_ERROR(Meet(world));
    if (world.rank() == 0) gate_.Hold();
    FSDP_RETURN_IF_ERROR(Meet(world));
    const absl::Time begin = absl::Now();
    // Rank 0 finds that step 1 is there.
    absl::Status status = checkpoints->SaveAsync(1, training->AsRun());
    if (world.rank() == 0) {
      // Waiting for the others ends after 30 s, at OptionsOf().timeout.
      EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
      gate_.Release();
    }
    status.Update(checkpoints->Wait());
    EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
    return absl::OkStatus();
  }));
}

// Steps of the training between SaveAsync() and Wait(), wherever shards rest.
class StepsBesideTest : public AsyncTest {
 protected:
  static TrainingSetup SetupOf(Tier tier) {
    TrainingSetup setup;
    setup.model = ModelKind::kTransformer;
    setup.tier = tier;
    setup.fused = true;
    setup.directory = absl::StrCat(::testing::TempDir(), "/steps_beside");
    std::filesystem::create_directories(setup.directory);
    return setup;
  }

  // SaveAsync(), steps and Wait() on one rank; the losses are those of
  // `unbroken` from step 1 on.
  absl::Status SaveBesideSteps(Communicator& world, Tier tier,
                               int64_t staging_bytes,
                               const std::vector<double>& unbroken) {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, SetupOf(tier)));
    FSDP_RETURN_IF_ERROR(training->Step(0).status());
    FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Open(world, OptionsOf(staging_bytes)));
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(1, training->AsRun()));
    // What is left in memory waits until the steps are taken.
    FSDP_RETURN_IF_ERROR(Meet(world));
    gate_.Hold();
    for (size_t step = 1; step < unbroken.size(); ++step) {
      FSDP_ASSIGN_OR_RETURN(const double loss,
                            training->Step(static_cast<int>(step)));
      FSDP_RETURN_IF_ERROR(
          ::fsdp::testing::CheckThat(loss, unbroken[step], "loss"));
    }
    FSDP_RETURN_IF_ERROR(Meet(world));
    gate_.Release();
    FSDP_RETURN_IF_ERROR(checkpoints->Wait());
    // On a device again.
    return CheckLatest(world, *checkpoints, SetupOf(Tier::kDevice), 1, values);
  }

  // Without checkpoints.
  static std::vector<double> Losses(Tier tier, int steps) {
    std::vector<double> losses;
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const auto training,
                            ShardedTraining::Make(world, SetupOf(tier)));
      for (int step = 0; step < steps; ++step) {
        FSDP_ASSIGN_OR_RETURN(const double loss, training->Step(step));
        if (world.rank() == 0) losses.push_back(loss);
      }
      return absl::OkStatus();
    }));
    return losses;
  }
};

TEST_F(StepsBesideTest, WhatIsSavedIsWhatWasThereAtTheCall) {
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kSsd}) {
    const std::vector<double> unbroken = Losses(tier, /*steps=*/4);
    // A rank's part of the model and its two moments is some 11,000 bytes.
    for (const int64_t staging_bytes : {0, 1, 100, 3000, 1 << 20}) {
      SCOPED_TRACE(absl::StrCat(ToString(tier), ", ", staging_bytes));
      EXPECT_OK(RemoveTree(disk_, kRoot));
      gate_.Hold();
      std::thread disk([&] {
        gate_.AwaitHeld();
        gate_.Release();
      });
      EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) {
        return SaveBesideSteps(world, tier, staging_bytes, unbroken);
      }));
      disk.join();
    }
  }
}

// A rank whose disk stands still: the save fails, and the training goes on.

constexpr int kStalledRanks = 3;
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
  EXPECT_OK(
      RunAllRanks(kStalledRanks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training,
                              ShardedTraining::Make(world));
        FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
        FSDP_RETURN_IF_ERROR(training->Step(0).status());
        FSDP_RETURN_IF_ERROR(Meet(world));
        if (world.rank() == stalled()) gate_.Hold();
        EXPECT_THAT(
            checkpoints->Save(1, training->AsRun()),
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
  EXPECT_OK(
      RunAllRanks(kStalledRanks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training,
                              ShardedTraining::Make(world));
        FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
        FSDP_RETURN_IF_ERROR(Meet(world));
        if (world.rank() == stalled()) gate_.Hold();
        FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(1, training->AsRun()));
        FSDP_RETURN_IF_ERROR(training->Step(0).status());
        EXPECT_THAT(checkpoints->Wait(), StatusIs(Code::kDeadlineExceeded,
                                                  HasSubstr(Names(stalled()))));
        FSDP_RETURN_IF_ERROR(training->Step(1).status());
        // The disk does not answer yet.
        FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(2, training->AsRun()));
        FSDP_RETURN_IF_ERROR(training->Step(2).status());
        EXPECT_THAT(
            checkpoints->Wait(),
            StatusIs(
                Code::kUnavailable,
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
    FSDP_ASSIGN_OR_RETURN(const auto training, ShardedTraining::Make(world));
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
