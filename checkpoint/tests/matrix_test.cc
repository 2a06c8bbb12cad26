// From any number of ranks to any other, in any strategy, dtype, tier and
// layout of files, with any model and optimizer. A part in which each two
// choices meet; all of ranks, strategies, dtypes and tiers where the
// environment has CHECKPOINT_MATRIX=all.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/files/testing/real_files.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::FreePath;
using ::fsdp::testing::Unowned;

constexpr int kRanks[] = {1, 2, 3, 4, 8};
constexpr int kStepsBefore = 4;
constexpr int kStepsAfter = 10;

struct Case {
  int writers = 1;
  int readers = 1;
  TrainingSetup before;
  TrainingSetup after;
  bool async = false;
  CheckpointerOptions checkpoints;
};

std::string ToString(const Case& one) {
  return absl::StrCat(
      one.writers, " to ", one.readers, one.async ? " async" : "",
      one.checkpoints.layout == SaveLayout::kPerRank ? " by rank" : "",
      one.checkpoints.commit_by == CommitBy::kManifest ? " and manifest: "
                                                       : ": ",
      ToString(one.before), " then ", ToString(one.after));
}

// Which of each a case has.
enum Level {
  kWriters,
  kReaders,
  kStrategy,
  kNumbers,
  kTier,
  kOtherStrategy,
  kOtherTier,
  kModel,
  kOptimizer,
  kUnits,
  kAsync,
  kLayout,
};
const std::vector<int> kLevels = {
    5, 5, 5, kNumNumberKinds, 3, 5, 3, kNumModelKinds, kNumOptimizerKinds,
    4, 2, 3};

Case CaseOf(const std::vector<int>& row, const std::string& directory) {
  Case result;
  result.writers = kRanks[row[kWriters]];
  result.readers = kRanks[row[kReaders]];
  result.async = row[kAsync] != 0;
  std::tie(result.before, result.after) =
      SetupsOf({row[kModel], row[kNumbers], row[kOptimizer], row[kStrategy],
                row[kTier], row[kOtherStrategy], row[kOtherTier], directory});
  result.before.units = row[kUnits] % 2 == 0;
  result.after.units = row[kUnits] / 2 == 0;
  result.checkpoints.staging_bytes = 1 << 12;  // more is written
  if (row[kLayout] > 0) result.checkpoints.layout = SaveLayout::kPerRank;
  if (row[kLayout] > 1) result.checkpoints.commit_by = CommitBy::kManifest;
  return result;
}

struct Expected {
  Values values;                // whole
  std::vector<Values> buffers;  // of each rank
  std::vector<double> losses;   // of steps after the save
  double off = 0;  // the largest |loss - expected|, see ToleranceOf()
};

absl::Status Write(Communicator& world, const Case& one,
                   const std::string& folder, Expected& expected) {
  FSDP_ASSIGN_OR_RETURN(const auto training,
                        ShardedTraining::Make(world, one.before));
  for (int step = 0; step < kStepsBefore; ++step) {
    FSDP_RETURN_IF_ERROR(training->Step(step).status());
  }
  FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
  expected.buffers[world.rank()] = training->Buffers();
  FSDP_ASSIGN_OR_RETURN(
      const auto checkpoints,
      Checkpointer::Open(folder, Unowned(world), one.checkpoints));
  const TrainingRun run = training->AsRun();
  FSDP_RETURN_IF_ERROR(one.async ? checkpoints->SaveAsync(kStepsBefore, run)
                                 : checkpoints->Save(kStepsBefore, run));
  for (int step = kStepsBefore; step < kStepsBefore + kStepsAfter; ++step) {
    FSDP_ASSIGN_OR_RETURN(const double loss, training->Step(step));
    if (world.rank() == 0) expected.losses.push_back(loss);
  }
  if (world.rank() == 0) expected.values = values;
  return checkpoints->Wait();
}

bool HasSameSums(const Case& one) {
  return one.writers == one.readers &&
         one.before.strategy == one.after.strategy;
}

// How far off the losses of one may be from those of the other, in parts of the
// first: another number of ranks has other sums, in float32 or of bfloat16's
// eight bits.
double ToleranceOf(const Case& one) {
  const bool same_shards = one.before.units == one.after.units;
  if (HasSameSums(one) && (same_shards || StepsElementsAlike(one.before))) {
    return 0;
  }
  return one.before.numbers == NumberKind::kFloat32 ? 1e-6 : 1.0 / 64;
}

absl::Status Read(Communicator& world, const Case& one,
                  const std::string& folder, Expected& expected) {
  FSDP_ASSIGN_OR_RETURN(const auto training,
                        ShardedTraining::Make(world, one.after, /*seed=*/5));
  FSDP_ASSIGN_OR_RETURN(
      const auto checkpoints,
      Checkpointer::Open(folder, Unowned(world), one.checkpoints));
  TrainingRun run = training->AsRun();
  FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> step,
                        checkpoints->LoadLatest(run));
  FSDP_RETURN_IF_ERROR(::fsdp::testing::CheckThat(
      step, ::testing::Optional(kStepsBefore), "step"));
  FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
  if (world.rank() == 0) {
    FSDP_RETURN_IF_ERROR(CheckEqual(values, expected.values));
  }
  const size_t buffers_of = one.writers == one.readers ? world.rank() : 0;
  FSDP_RETURN_IF_ERROR(
      CheckEqual(training->Buffers(), expected.buffers[buffers_of]));
  // Each rank norms by the rows that it sees.
  const bool same_rows =
      one.before.model != ModelKind::kBatchNorm || one.writers == one.readers;
  if (!same_rows) return absl::OkStatus();
  const double tolerance = ToleranceOf(one);
  // Losses get small, and what they are made of does not.
  const double scale = std::abs(expected.losses[0]);
  for (int i = 0; i < kStepsAfter; ++i) {
    FSDP_ASSIGN_OR_RETURN(const double loss, training->Step(kStepsBefore + i));
    const double wanted = expected.losses[i];
    const double off = std::abs(loss - wanted) / scale;
    if (world.rank() == 0) expected.off = std::max(expected.off, off);
    // Before the first step shards begin elsewhere, and have the same values.
    if (off <= (i == 0 && HasSameSums(one) ? 0 : tolerance)) continue;
    return absl::InternalError(absl::StrCat("loss ", i, " is ", loss, ", not ",
                                            wanted, ": off by ", off));
  }
  return absl::OkStatus();
}

// By tolerance: how many cases, and the most that a loss was off.
using Summary = std::map<double, std::pair<int, double>>;

void RunCases(const std::vector<std::vector<int>>& rows, Summary& summary) {
  for (const std::vector<int>& row : rows) {
    const std::string folder = FreePath("matrix");
    const std::string directory = EmptyFolder("ssd");
    const Case one = CaseOf(row, directory);
    SCOPED_TRACE(ToString(one));
    Expected expected;
    expected.buffers.resize(one.writers);
    EXPECT_OK(RunAllRanks(one.writers, [&](Communicator& world) {
      return Write(world, one, folder, expected);
    }));
    if (expected.losses.size() != kStepsAfter) continue;
    EXPECT_OK(RunAllRanks(one.readers, [&](Communicator& world) {
      return Read(world, one, folder, expected);
    }));
    auto& [count, off] = summary[ToleranceOf(one)];
    ++count;
    off = std::max(off, expected.off);
  }
}

void Print(const Summary& summary) {
  for (const auto& [tolerance, found] : summary) {
    std::cout << found.first << " cases of tolerance " << tolerance
              << ", at most off by " << found.second << std::endl;
  }
}

TEST(CoverPairsTest, EachTwoChoicesMeet) {
  const std::vector<int> levels = {5, 1, 3, 6, 2};
  const std::vector<std::vector<int>> rows = CoverPairs(levels);
  EXPECT_LT(rows.size(), 60);  // 30 at least, 180 in all
  for (size_t i = 0; i < levels.size(); ++i) {
    for (size_t j = i + 1; j < levels.size(); ++j) {
      std::set<std::pair<int, int>> met;
      for (const std::vector<int>& row : rows) met.insert({row[i], row[j]});
      EXPECT_EQ(met.size(), levels[i] * levels[j]) << i << " " << j;
    }
  }
}

bool WantsAll() {
  const char* const matrix = std::getenv("CHECKPOINT_MATRIX");
  return matrix != nullptr && std::string(matrix) == "all";
}

TEST(MatrixTest, EachTwoChoices) {
  if (WantsAll()) GTEST_SKIP() << "they are among all";
  Summary summary;
  RunCases(CoverPairs(kLevels), summary);
  Print(summary);
}

// The same on as many ranks: to the bit, in other units, too, where steps make
// the same of an element.
TEST(MatrixTest, TheSameAgain) {
  Summary summary;
  for (const int ranks : {0, 1, 2, 3, 4}) {
    for (const auto& some : CoverPairs(
             {5, kNumNumberKinds, 3, kNumModelKinds, kNumOptimizerKinds})) {
      // A fifth of them for each number.
      if ((some[0] + some[1] + some[3] + some[4]) % 5 != ranks) continue;
      const int units = (some[0] + some[3]) % 4;
      RunCases({{ranks, ranks, some[0], some[1], some[2], some[0], some[2],
                 some[3], some[4], units, some[4] % 2, some[4] % 3}},
               summary);
    }
  }
  Print(summary);
}

// Of one strategy, so that several can be run at once.
class WholeMatrixTest : public ::testing::TestWithParam<int> {};

TEST_P(WholeMatrixTest, OfAStrategy) {
  if (!WantsAll()) GTEST_SKIP() << "CHECKPOINT_MATRIX=all is not set";
  Summary summary;
  for (int count = 0; count < 5 * 5 * 5 * kNumNumberKinds * 3;) {
    std::vector<int> row(kLevels.size());
    int rest = count;
    for (size_t level = kOtherStrategy; level-- > 0; rest /= kLevels[level]) {
      row[level] = rest % kLevels[level];
    }
    // The others go round.
    for (size_t level = kOtherStrategy; level < kLevels.size(); ++level) {
      row[level] =
          (count * 7 + count / 5 * static_cast<int>(level)) % kLevels[level];
    }
    row[kOtherTier] = row[kTier];
    if (row[kWriters] == row[kReaders]) row[kOtherStrategy] = row[kStrategy];
    if (row[kStrategy] == GetParam()) RunCases({row}, summary);
    if (++count % 125 == 0) std::cout << count << " of 1125" << std::endl;
  }
  Print(summary);
}

INSTANTIATE_TEST_SUITE_P(All, WholeMatrixTest, ::testing::Range(0, 5));

}  // namespace
}  // namespace fsdp::checkpoint::testing
