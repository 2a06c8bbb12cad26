// Ranks that are lost in any of the messages of a save: whoever is told of an
// error is told as well where the checkpoint counts all the same.
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tests/sharded_training.h"
#include "comm/communicator.h"
#include "comm/testing/failing_communicator.h"
#include "comm/testing/run_ranks.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::FailurePlan;

constexpr int kRanks = 2;
constexpr char kRoot[] = "/run";

// The groups that are split from `base` fail in their call number `nth`.
class FailsInPart final : public comm::ForwardingCommunicator {
 public:
  FailsInPart(std::unique_ptr<Communicator> base, int64_t nth)
      : ForwardingCommunicator(std::move(base)), nth_(nth) {}

  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                      int key) override {
    FSDP_ASSIGN_OR_RETURN(auto part, base().Split(color, key));
    FailurePlan plan;
    plan.nth = nth_;
    return comm::testing::FailOnPlan(std::move(part), plan);
  }

 private:
  const int64_t nth_;
};

struct Outcome {
  std::vector<absl::Status> statuses;  // of Save(), by rank
  bool is_saved = false;
};

Outcome SaveWhereOneIsLost(CommitBy commit_by, int victim, int64_t nth) {
  SimulatedFileSystem disk;
  Outcome outcome;
  outcome.statuses =
      comm::testing::RunRanks(kRanks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training,
                              ShardedTraining::Make(world, {}, /*seed=*/1));
        FSDP_ASSIGN_OR_RETURN(auto own, world.Split(0, world.rank()));
        std::shared_ptr<Communicator> ranks = std::move(own);
        if (world.rank() == victim) {
          FSDP_ASSIGN_OR_RETURN(auto again, ranks->Split(0, world.rank()));
          ranks = std::make_shared<FailsInPart>(std::move(again), nth);
        } else {
          FSDP_ASSIGN_OR_RETURN(ranks, ranks->Split(0, world.rank()));
        }
        CheckpointerOptions options;
        options.files = &disk;
        options.commit_by = commit_by;
        if (commit_by == CommitBy::kManifest) {
          options.layout = SaveLayout::kPerRank;
        }
        FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                              Checkpointer::Open(kRoot, ranks, options));
        return checkpoints->Save(1, training->AsRun());
      });
  // Who is lost before the folder is made leaves none.
  outcome.is_saved =
      disk.List(kRoot).ok() && absl::c_linear_search(StepsIn(disk, kRoot), 1);
  return outcome;
}

class LostRankTest
    : public ::testing::TestWithParam<std::tuple<CommitBy, int>> {};

INSTANTIATE_TEST_SUITE_P(
    All, LostRankTest,
    ::testing::Combine(::testing::Values(CommitBy::kRename,
                                         CommitBy::kManifest),
                       ::testing::Range(0, kRanks)));

TEST_P(LostRankTest, ErrorsSayWhereTheCheckpointMayCount) {
  constexpr int64_t kMostCalls = 100;
  const auto [commit_by, victim] = GetParam();
  int saved_with_errors = 0;
  int64_t nth = 0;
  for (; nth < kMostCalls; ++nth) {
    const Outcome outcome = SaveWhereOneIsLost(commit_by, victim, nth);
    bool all_ok = true;
    for (int rank = 0; rank < kRanks; ++rank) {
      const absl::Status& status = outcome.statuses[rank];
      all_ok = all_ok && status.ok();
      if (status.ok()) {
        EXPECT_TRUE(outcome.is_saved) << "call " << nth;
        continue;
      }
      if (!outcome.is_saved) continue;
      ++saved_with_errors;
      EXPECT_TRUE(absl::StrContains(status.message(),
                                    "; step 1 may be saved all the same"))
          << "call " << nth << ", rank " << rank << ": " << status;
    }
    if (all_ok) break;
  }
  EXPECT_LT(nth, kMostCalls);
  EXPECT_GT(saved_with_errors, 0);
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
