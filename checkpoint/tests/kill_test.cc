// Programs that are killed: this one, started again with a role, that goes on
// where the one before was, and ends with the bits of an unbroken run.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/testing/this_program.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "checkpoint/tests/watched_file_system.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/toy_model.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::testing::RunThisProgram;
using ::fsdp::testing::Unowned;

constexpr char kRole[] = "CHECKPOINT_KILL_TEST_ROLE";
constexpr int64_t kSteps = 200;  // each of which is saved
constexpr int kKillsInOneProcess = 100;
constexpr int kKillsOfRanks = 12;

// As text: FOLDER,VICTIM,CALL,PROCESSES.
struct Role {
  std::string folder;
  int victim = 0;    // the rank that kills its process
  int64_t call = 0;  // before this change of its; negative: never
  bool processes = false;
};

std::string ToString(const Role& role) {
  return absl::StrCat(role.folder, ",", role.victim, ",", role.call, ",",
                      int{role.processes});
}

Role ParseRole(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  Role role;
  int processes = 0;
  FSDP_CHECK(parts.size() == 4 && absl::SimpleAtoi(parts[1], &role.victim) &&
             absl::SimpleAtoi(parts[2], &role.call) &&
             absl::SimpleAtoi(parts[3], &processes));
  role.folder = parts[0];
  role.processes = processes != 0;
  return role;
}

// --- The program -------------------------------------------------------------

absl::Status CheckIsUnbroken(Communicator& world, ShardedTraining& training,
                             int64_t steps) {
  FSDP_ASSIGN_OR_RETURN(const auto unbroken, ShardedTraining::Make(world));
  for (int step = 0; step < steps; ++step) {
    FSDP_RETURN_IF_ERROR(unbroken->Step(step).status());
  }
  FSDP_ASSIGN_OR_RETURN(const Values expected, unbroken->Gather());
  FSDP_ASSIGN_OR_RETURN(const Values values, training.Gather());
  return CheckSameBits(values, expected);
}

void Say(Communicator& world, absl::string_view what, int64_t step) {
  if (world.rank() != 0) return;
  std::cout << absl::StrCat("\n", what, " ", step, "\n") << std::flush;
}

absl::Status Train(Communicator& world, const Role& role,
                   std::atomic<int64_t>& changes) {
  const bool kills = role.call >= 0 && world.rank() == role.victim;
  WatchedFileSystem files(RealFileSystem(),
                          [&](absl::string_view, const std::string&) {
                            if (kills && changes++ == role.call)
                              kill(getpid(), SIGKILL);
                            return absl::OkStatus();
                          });
  FSDP_ASSIGN_OR_RETURN(const auto training, ShardedTraining::Make(world));
  CheckpointerOptions options;
  options.files = &files;
  options.keep_last = 2;
  options.staging_bytes = 1 << 16;
  options.timeout = absl::Seconds(30);
  FSDP_ASSIGN_OR_RETURN(
      const auto checkpoints,
      Checkpointer::Open(role.folder, Unowned(world), options));
  TrainingRun run = training->AsRun();
  FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> found,
                        checkpoints->LoadLatest(run));
  const int64_t begin = found.value_or(0);
  FSDP_RETURN_IF_ERROR(CheckIsUnbroken(world, *training, begin));
  Say(world, "loaded", begin);
  for (int64_t step = begin; step < kSteps; ++step) {
    FSDP_RETURN_IF_ERROR(training->Step(static_cast<int>(step)).status());
    const int64_t taken = step + 1;
    if (taken % 2 == 0) {
      FSDP_RETURN_IF_ERROR(checkpoints->Save(taken, run));
      Say(world, "saved", taken);
    } else {
      FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(taken, run));
    }
  }
  FSDP_RETURN_IF_ERROR(checkpoints->Wait());
  FSDP_RETURN_IF_ERROR(CheckIsUnbroken(world, *training, kSteps));
  Say(world, "ended", kSteps);
  return absl::OkStatus();
}

int Main(int argc, char** argv, const Role& role) {
  std::atomic<int64_t> changes{0};
  if (role.processes) {
    return comm::RunRanks(argc, argv, /*ranks=*/2,
                          [&](const std::shared_ptr<Communicator>& ranks) {
                            return Train(*ranks, role, changes);
                          });
  }
  const absl::Status status = comm::testing::RunAllRanks(
      2, [&](Communicator& world) { return Train(world, role, changes); });
  if (!status.ok()) std::cout << "\nfailed " << status << std::endl;
  return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}

// --- The test ----------------------------------------------------------------

struct Outcome {
  int64_t loaded = -1;
  int64_t saved = 0;  // the last one that was said to be
  bool ended = false;
  bool failed = false;  // by itself, not because a rank was killed
  std::string output;
};

Outcome Execute(const Role& role) {
  Outcome outcome;
  outcome.output =
      RunThisProgram(absl::StrCat(kRole, "='", ToString(role), "'")).output;
  for (absl::string_view line : absl::StrSplit(outcome.output, '\n')) {
    absl::ConsumePrefix(&line, "[0] ");
    int64_t step = 0;
    if (absl::ConsumePrefix(&line, "loaded ")) {
      FSDP_CHECK(absl::SimpleAtoi(line, &outcome.loaded));
    } else if (absl::ConsumePrefix(&line, "saved ")) {
      FSDP_CHECK(absl::SimpleAtoi(line, &step));
      outcome.saved = step;
    } else if (absl::ConsumePrefix(&line, "ended ")) {
      outcome.ended = true;
    } else if (absl::StartsWith(line, "failed ")) {
      outcome.failed = true;
    }
  }
  return outcome;
}

// Kills one after the other in one folder; then one that is not killed.
void KillAndGoOn(const std::string& folder, bool processes, int kills) {
  std::mt19937_64 random(1);
  int64_t saved = 0;
  int64_t least = 0;
  for (int i = 0; i <= kills; ++i) {
    Role role;
    role.folder = folder;
    role.processes = processes;
    role.victim = static_cast<int>(random() % 2);
    role.call = i < kills ? static_cast<int64_t>(random() % 120) : -1;
    SCOPED_TRACE(absl::StrCat("run ", i, ", ", ToString(role)));
    const Outcome outcome = Execute(role);
    // Killed while it opened the folder, it loads nothing.
    if (outcome.loaded >= 0 || i == kills) {
      EXPECT_GE(outcome.loaded, least) << outcome.output;
    }
    EXPECT_FALSE(outcome.failed) << outcome.output;
    EXPECT_EQ(outcome.ended,
              i == kills || outcome.loaded == kSteps || outcome.saved == kSteps)
        << outcome.output;
    saved = std::max(outcome.saved, saved);
    least = saved;
    if (::testing::Test::HasFailure()) return;
  }
  std::cout << kills << " kills; " << saved << " steps" << std::endl;
}

TEST(KillTest, AProcess) {
  KillAndGoOn(FreePath("kill_process"), /*processes=*/false,
              kKillsInOneProcess);
}

TEST(KillTest, OneRankOfTwoProcesses) {
  KillAndGoOn(FreePath("kill_rank"), /*processes=*/true, kKillsOfRanks);
}

}  // namespace
}  // namespace fsdp::checkpoint::testing

int main(int argc, char** argv) {
  using fsdp::checkpoint::testing::kRole;
  if (const char* const role = std::getenv(kRole)) {
    return fsdp::checkpoint::testing::Main(
        argc, argv, fsdp::checkpoint::testing::ParseRole(role));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
