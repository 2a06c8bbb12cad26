// By way of torch.distributed.checkpoint's files, from any number of ranks to
// any other, in any strategy, dtype and tier, with any model and optimizer, by
// either style of names: a part in which each two choices meet.
#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/dcp_files.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/run/run.h"
#include "checkpoint/run/training_json.h"
#include "checkpoint/tests/covering.h"
#include "checkpoint/tests/sharded_training.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;

constexpr char kFolder[] = "/dcp";
constexpr int kStepsBefore = 4;
constexpr int kStepsAfter = 10;

struct Case {
  int writers = 1;
  int readers = 1;
  bool torchtitan = false;
  TrainingSetup before;
  TrainingSetup after;

  bool IsSame() const {
    return writers == readers && before.strategy == after.strategy;
  }
};

std::string ToString(const Case& one) {
  return absl::StrCat(one.writers, " to ", one.readers,
                      one.torchtitan ? ", torchtitan: " : ": ",
                      ToString(one.before), " then ", ToString(one.after));
}

// Which of each a case has.
enum Level {
  kWriters,
  kReaders,
  kNames,
  kOptimizer,
  kModel,
  kNumbers,
  kTier,
  kOtherTier,
  kStrategy,
  kOtherStrategy,
};
const std::vector<int> kLevels = {
    3, 3, 2, kNumOptimizerKinds, kNumModelKinds, kNumNumberKinds, 3, 3, 5, 5};

Case CaseOf(const std::vector<int>& row, const std::string& directory) {
  Case result;
  result.writers = 1 + row[kWriters];
  result.readers = 1 + row[kReaders];
  result.torchtitan = row[kNames] != 0;
  std::tie(result.before, result.after) =
      SetupsOf({row[kModel], row[kNumbers], row[kOptimizer], row[kStrategy],
                row[kTier], row[kOtherStrategy], row[kOtherTier], directory});
  return result;
}

// What one run had, for the other.
struct Handover {
  SimulatedFileSystem files;
  Values values;               // whole
  TrainingRecord rest;         // what is not in such files
  std::vector<double> losses;  // of steps after the export
};

absl::Status Write(Communicator& world, const Case& one, Handover& handover) {
  FSDP_ASSIGN_OR_RETURN(const auto training,
                        ShardedTraining::Make(world, one.before, /*seed=*/1));
  for (int step = 0; step < kStepsBefore; ++step) {
    FSDP_RETURN_IF_ERROR(training->Step(step).status());
  }
  FSDP_ASSIGN_OR_RETURN(Values values, training->Gather());
  ExportDcpOptions options;
  options.torchtitan = one.torchtitan;
  options.files = &handover.files;
  const TrainingRun run = training->AsRun();
  FSDP_RETURN_IF_ERROR(ExportDcp(kFolder, run, options));
  if (world.rank() == 0) {
    handover.values = std::move(values);
    handover.rest = RecordOf(run, nullptr, kStepsBefore, world.world_size());
  }
  for (int step = kStepsBefore; step < kStepsBefore + kStepsAfter; ++step) {
    FSDP_ASSIGN_OR_RETURN(const double loss, training->Step(step));
    if (world.rank() == 0) handover.losses.push_back(loss);
  }
  return absl::OkStatus();
}

absl::Status Read(Communicator& world, const Case& one, Handover& handover) {
  FSDP_ASSIGN_OR_RETURN(const auto training,
                        ShardedTraining::Make(world, one.after, /*seed=*/5));
  TrainingRun run = training->AsRun();
  run.entries["mine"] = "stays";
  LoadDcpOptions options;
  options.files = &handover.files;
  FSDP_RETURN_IF_ERROR(LoadDcp(kFolder, run, options));
  // All else is the user's business: here as it was in the other run.
  const TrainingRecord rest = RecordOf(run, nullptr, 0, world.world_size());
  if (rest.scheduler_steps != std::vector<int64_t>{0} ||
      rest.entries.at("mine") != "stays") {
    return absl::InternalError("more than model and optimizer was loaded");
  }
  FSDP_RETURN_IF_ERROR(Restore(handover.rest, run));
  FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
  if (world.rank() == 0) {
    FSDP_RETURN_IF_ERROR(CheckSameBits(values, handover.values));
  }
  // Each rank norms by the rows that it sees, and has buffers of its own.
  if (one.before.model == ModelKind::kBatchNorm) return absl::OkStatus();
  double tolerance =
      one.before.numbers == NumberKind::kFloat32 ? 1e-6 : 1.0 / 64;
  if (one.IsSame()) tolerance = 0;
  for (int i = 0; i < kStepsAfter; ++i) {
    FSDP_ASSIGN_OR_RETURN(const double loss, training->Step(kStepsBefore + i));
    const double wanted = handover.losses[i];
    // Losses get small, and what they are made of does not.
    const double off = std::abs(loss - wanted) / std::abs(handover.losses[0]);
    if (off <= tolerance) continue;
    return absl::InternalError(absl::StrCat("loss ", i, " is ", loss, ", not ",
                                            wanted, ": off by ", off));
  }
  return absl::OkStatus();
}

void RunCases(const std::vector<std::vector<int>>& rows) {
  const std::string directory = absl::StrCat(::testing::TempDir(), "/dcp_ssd");
  for (const std::vector<int>& row : rows) {
    std::filesystem::remove_all(directory);
    std::filesystem::create_directories(directory);
    const Case one = CaseOf(row, directory);
    SCOPED_TRACE(ToString(one));
    Handover handover;
    ASSERT_OK(RunAllRanks(one.writers, [&](Communicator& world) {
      return Write(world, one, handover);
    }));
    EXPECT_OK(RunAllRanks(one.readers, [&](Communicator& world) {
      return Read(world, one, handover);
    }));
  }
}

TEST(DcpMatrixTest, EachTwoChoices) { RunCases(CoverPairs(kLevels)); }

// The same on as many ranks: to the bit.
TEST(DcpMatrixTest, TheSameAgain) {
  for (const std::vector<int>& some :
       CoverPairs({3, 2, kNumOptimizerKinds, kNumNumberKinds})) {
    RunCases({{some[0], some[0], some[1], some[2], 0, some[3], 0, 0, 0, 0}});
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
