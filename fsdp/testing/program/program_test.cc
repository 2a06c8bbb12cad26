// Programs as data: drawing, text, rules, and making them smaller.
#include "fsdp/testing/program/program.h"

#include <cstdio>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "fsdp/testing/program/program_fuzzer.h"

namespace fsdp::testing {
namespace {

constexpr uint32_t kSeeds = 3000;

DrawOptions EverythingHeld() {
  DrawOptions options;
  options.held = true;
  return options;
}

// Reading makes programs valid, which valid ones are already.
TEST(ProgramTest, TextIsReadBackAndValidProgramsStayAsTheyAre) {
  EXPECT_EQ(ToString(ParseProgram("").value()), "");
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    const Program program = DrawProgram(seed, EverythingHeld());
    const std::string text = ToString(program);
    ASSERT_OK_AND_ASSIGN(const Program read, ParseProgram(text));
    ASSERT_EQ(ToString(read), text) << "seed " << seed;
  }
}

TEST(ProgramTest, WhatIsKeptHasABackwardThatReducesIt) {
  const std::string text = "units=2 bare=1 micro=2 no_sync=1 unit1.frozen=all";
  EXPECT_EQ(ParseProgram(text).value().no_sync, 1);
  for (const char* skips : {" unit0.skipped_micro=2", " unit0.skipped_in=1"}) {
    EXPECT_EQ(ParseProgram(text + skips).value().no_sync, 0) << skips;
  }
}

// A value that cannot be drawn would be tested by no seed.
TEST(ProgramTest, EveryValueOfEveryFieldIsDrawn) {
  std::set<std::string> missing;
  Program program;
  for (const Field& field : Fields(program, /*all=*/true)) {
    // Of numbers with a wide range, only some are drawn.
    if (field.high - field.low > 10) continue;
    for (int value = field.low; value <= field.high; ++value) {
      missing.insert(absl::StrCat(field.name, "=", value));
    }
  }
  for (uint32_t seed = 0; seed < 4 * kSeeds; ++seed) {
    program = DrawProgram(seed, EverythingHeld());
    for (const Field& field : Fields(program, /*all=*/false)) {
      missing.erase(absl::StrCat(field.name, "=", *field.value));
    }
  }
  // A restart needs kept files, and comes in few programs.
  for (auto it = missing.begin(); it != missing.end();) {
    const bool is_call = absl::StrContains(*it, "before");
    it = is_call ? missing.erase(it) : std::next(it);
  }
  EXPECT_EQ(missing, std::set<std::string>());
}

TEST(ProgramTest, ErrorsNameWhatIsUnknown) {
  EXPECT_TRUE(
      absl::StrContains(ParseProgram("rank=2").status().message(), "rank=2"));
  EXPECT_TRUE(absl::StrContains(
      ParseProgram("step0.style=slow").status().message(), "step0.style=slow"));
  EXPECT_TRUE(absl::StrContains(ParseProgram("ranks=9").status().message(),
                                "ranks is 1 to 4"));
}

TEST(ProgramShrinkerTest, LeavesWhatTheFailureNeeds) {
  const auto fails = [](const Program& program) {
    return program.micro >= 2 && program.units[0].child &&
           program.steps[0].style == kRetain;
  };
  int found = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    const Program program = DrawProgram(seed);
    if (!fails(program)) continue;
    ++found;
    EXPECT_EQ(ToString(Shrink(program, fails, 500)),
              "micro=2 unit0.child=1 step0.style=retain");
  }
  EXPECT_GT(found, 0);
}

TEST(ProgramFuzzerTest, FindsAndShrinksWhatFailsAndCountsRefusals) {
  std::FILE* out = std::tmpfile();
  FuzzOptions options;
  options.end = 200;
  options.max_failures = 2;
  options.out = out;
  const FuzzReport report =
      Fuzz(options, [](const Program& program) -> ProgramOutcome {
        if (program.group != kLocalGroup) {
          return {ProgramOutcome::kRefused, "no"};
        }
        if (program.micro == 3) return {ProgramOutcome::kDiffers, "three"};
        return {};
      });
  std::fclose(out);
  ASSERT_EQ(report.failures.size(), 2);
  EXPECT_EQ(ToString(report.failures[0].program), "micro=3");
  EXPECT_GT(report.refused, 0);
  // Every seed up to the second failure has run, and no later one.
  EXPECT_EQ(report.seeds, report.failures[1].seed + 1);
}

TEST(ProgramOutcomeTest, TellsDifferencesFromErrors) {
  EXPECT_EQ(OutcomeOf(absl::OkStatus()).kind, ProgramOutcome::kSame);
  EXPECT_EQ(OutcomeOf(absl::InternalError("rank 1: differs: a")).kind,
            ProgramOutcome::kDiffers);
  EXPECT_EQ(OutcomeOf(absl::InternalError("rank 1: refused: a")).kind,
            ProgramOutcome::kRefused);
  EXPECT_EQ(OutcomeOf(absl::InternalError("rank 1: a")).kind,
            ProgramOutcome::kFails);
}

}  // namespace
}  // namespace fsdp::testing
