// Compares random training programs, sharded and plain, for fixed seeds.
// //fsdp/testing/program:program_fuzz runs others.
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"
#include "fsdp/testing/program/program_runner.h"
#include "fsdp/testing/program/sharded_program.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

TEST(ProgramFuzzTest, RandomProgramsGiveWhatPlainLibTorchGives) {
  FuzzOptions options;
  options.end = 150;
  options.max_failures = 1;
  const FuzzReport report = Fuzz(options, [](const Program& program) {
    return RunProgram(program, ::testing::TempDir());
  });
  for (const FuzzFailure& failure : report.failures) {
    ADD_FAILURE() << "seed " << failure.seed << ": " << failure.outcome.text
                  << "\n"
                  << ToString(failure.program);
  }
  // Programs that are refused show nothing.
  EXPECT_LT(report.refused, report.seeds / 10);
}

// A sharded run is compared with what another program has recorded.
struct Mismatch {
  const char* sharded;
  const char* recorded;
  const char* seen;  // a part of the error
};

class ProgramComparisonTest : public ::testing::TestWithParam<Mismatch> {};

TEST_P(ProgramComparisonTest, SeesTheDifference) {
  const auto sharded = ParseProgram(GetParam().sharded);
  const auto recorded = ParseProgram(GetParam().recorded);
  ASSERT_OK(sharded.status());
  ASSERT_OK(recorded.status());
  const ProgramRecord record = RunPlainProgram(*recorded);
  const absl::Status status =
      comm::testing::RunAllRanks(2, [&](comm::Communicator& world) {
        return RunShardedProgram(*sharded, record, world, ::testing::TempDir());
      });
  EXPECT_EQ(OutcomeOf(status).kind, ProgramOutcome::kDiffers) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), GetParam().seen)) << status;
}

INSTANTIATE_TEST_SUITE_P(
    Everything, ProgramComparisonTest,
    ::testing::Values(
        Mismatch{"", "weight_decay=1", "after step 0"},
        Mismatch{"compare_each=0", "compare_each=0 weight_decay=1",
                 "the loss of step 1"},
        Mismatch{"steps=1 optimizer=adamw", "steps=1 optimizer=adamw micro=2",
                 "the loss of step 0"},
        Mismatch{"steps=1 micro=2", "steps=1 micro=2 divide=1", "after step 0"},
        Mismatch{"clip=1", "clip=1 norm=1", "the norm of step 0"},
        Mismatch{"scaler=1", "scaler=1 infinite_in=1", "the scale after"},
        Mismatch{"input_grad=1", "input_grad=1 step0.style=retain",
                 "the gradient of input 0"},
        Mismatch{"unit0.batch_norm=1",
                 "unit0.batch_norm=1 step0.before=lost_forward",
                 "running_mean after step 0"},
        Mismatch{"unit0.counter=1", "unit0.counter=1 step0.before=lost_forward",
                 "counter after step 0"},
        Mismatch{"step0.before=eval", "step0.before=eval unit0.outputs=written",
                 "output 0 of an evaluation"},
        Mismatch{"optimizer=adagrad", "optimizer=adagrad step0.style=retain",
                 "after step 0"},
        Mismatch{"step0.before=summon step0.before_too=save",
                 "step0.before=visit step0.before_too=save",
                 "what is saved of"}));

}  // namespace
}  // namespace fsdp::testing
