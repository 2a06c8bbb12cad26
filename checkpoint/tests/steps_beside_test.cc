// Steps of the training between SaveAsync() and Wait(), wherever shards rest,
// with memory for all copies or for a few at a time, and on a disk that gets
// full meanwhile.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tests/sharded_training.h"
#include "checkpoint/tests/watched_file_system.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::CheckThat;

constexpr char kRoot[] = "/run";
constexpr char kBallast[] = "/ballast";
constexpr int kRanks = 2;
constexpr int64_t kCapacity = 1 << 20;
constexpr absl::Duration kTimeout = absl::Seconds(30);

class StepsBesideTest : public ::testing::Test {
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

  absl::StatusOr<std::unique_ptr<Checkpointer>> Open(Communicator& world,
                                                     int64_t staging_bytes) {
    CheckpointerOptions options;
    options.files = &files_;
    options.staging_bytes = staging_bytes;
    options.timeout = kTimeout;
    return Checkpointer::Open(kRoot, ::fsdp::testing::Unowned(world), options);
  }

  // On a device again.
  static absl::Status CheckNewest(Communicator& world,
                                  Checkpointer& checkpoints, int64_t step,
                                  const Values& values) {
    return CheckLatest(world, checkpoints, SetupOf(Tier::kDevice), step,
                       values);
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
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world, staging_bytes));
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(1, training->AsRun()));
    // What is left in memory waits until the steps are taken.
    FSDP_RETURN_IF_ERROR(Meet(world));
    gate_.Hold();
    for (size_t step = 1; step < unbroken.size(); ++step) {
      FSDP_ASSIGN_OR_RETURN(const double loss,
                            training->Step(static_cast<int>(step)));
      FSDP_RETURN_IF_ERROR(
          CheckThat(loss, unbroken[step], absl::StrCat("loss of step ", step)));
    }
    FSDP_RETURN_IF_ERROR(Meet(world));
    gate_.Release();
    FSDP_RETURN_IF_ERROR(checkpoints->Wait());
    return CheckNewest(world, *checkpoints, 1, values);
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

  // Leaves `bytes` of the disk.
  void FillUpTo(int64_t bytes) {
    ASSERT_OK_AND_ASSIGN(const int64_t free, disk_.FreeBytes("/"));
    ASSERT_OK_AND_ASSIGN(const auto file,
                         disk_.OpenForWriting(kBallast, Caching::kCached));
    ASSERT_OK(file->SetSize(free - bytes));
  }

  SimulatedFileSystem disk_{kCapacity};
  WriteGate gate_;
  WatchedFileSystem files_{disk_,
                           [this](absl::string_view what, const std::string&) {
                             return gate_.Pass(what);
                           }};
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

absl::Status CheckIsFull(Communicator& world, const absl::Status& failed) {
  FSDP_RETURN_IF_ERROR(comm::CheckSame(world, failed.ToString(), "errors",
                                       absl::Now() + kTimeout));
  return failed.code() == absl::StatusCode::kResourceExhausted
             ? absl::OkStatus()
             : absl::InternalError(failed.ToString());
}

// In front of SaveAsync() of step 2 there is room for a part of a checkpoint,
// which is found out while steps are taken.
TEST_F(StepsBesideTest, ADiskThatGetsFull) {
  constexpr int kParts = 5;
  const std::vector<double> unbroken = Losses(Tier::kDevice, /*steps=*/6);
  for (int part = 0; part < kParts; ++part) {
    for (const int64_t staging_bytes : {300, 1 << 20}) {
      SCOPED_TRACE(absl::StrCat(part, ", ", staging_bytes));
      EXPECT_OK(RemoveTree(disk_, kRoot));
      ASSERT_OK_AND_ASSIGN(const int64_t empty, disk_.FreeBytes("/"));
      EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            const auto training,
            ShardedTraining::Make(world, SetupOf(Tier::kDevice)));
        FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                              Open(world, staging_bytes));
        int taken = 0;
        const auto step = [&]() -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(const double loss, training->Step(taken));
          return CheckThat(loss, unbroken[taken++], "loss");
        };
        FSDP_RETURN_IF_ERROR(step());
        FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
        FSDP_ASSIGN_OR_RETURN(const Values first, training->Gather());
        if (world.rank() == 0) {
          FSDP_ASSIGN_OR_RETURN(const int64_t free, disk_.FreeBytes("/"));
          FillUpTo((empty - free) * part / kParts);
        }
        FSDP_RETURN_IF_ERROR(Meet(world));
        FSDP_RETURN_IF_ERROR(step());
        FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(2, training->AsRun()));
        FSDP_RETURN_IF_ERROR(step());
        FSDP_RETURN_IF_ERROR(step());
        // The next call has the error, and begins nothing.
        FSDP_RETURN_IF_ERROR(
            CheckIsFull(world, checkpoints->SaveAsync(4, training->AsRun())));
        FSDP_RETURN_IF_ERROR(CheckNewest(world, *checkpoints, 1, first));
        FSDP_RETURN_IF_ERROR(Meet(world));
        if (world.rank() == 0) {
          FSDP_RETURN_IF_ERROR(disk_.RemoveFile(kBallast));
        }
        FSDP_RETURN_IF_ERROR(Meet(world));
        FSDP_RETURN_IF_ERROR(step());
        FSDP_ASSIGN_OR_RETURN(const Values last, training->Gather());
        FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(5, training->AsRun()));
        FSDP_RETURN_IF_ERROR(step());
        FSDP_RETURN_IF_ERROR(checkpoints->Wait());
        FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> steps,
                              checkpoints->Steps());
        EXPECT_THAT(steps, ::testing::ElementsAre(1, 5));
        return CheckNewest(world, *checkpoints, 5, last);
      }));
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
