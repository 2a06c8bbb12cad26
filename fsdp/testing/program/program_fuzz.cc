// Random training programs, sharded and plain:
//   ./bazelw run //fsdp/testing/program:program_fuzz -- --seeds=0:1000
//   ./bazelw run //fsdp/testing/program:program_fuzz -- --help
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/command_line.h"
#include "base/status_macros.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"
#include "fsdp/testing/program/program_runner.h"

ABSL_FLAG(std::string, seeds, "0:100", "BEGIN:END, the seeds to run");
ABSL_FLAG(int, seed, -1, "run this seed alone, and print it first");
ABSL_FLAG(double, seconds, 1e9, "start no seed after so many seconds");
ABSL_FLAG(std::string, program, "",
          "run this program, as a failure prints it: \"ranks=3 tied=tied\"");
ABSL_FLAG(std::string, off, "",
          "features that are not drawn: \"tied,unit0.child\"");
ABSL_FLAG(std::string, set, "",
          "features with a value of their own: \"ranks=2,group=shared\"");
ABSL_FLAG(bool, held, false,
          "draw also checkpointed regions of transparent models, which are "
          "known to fail");
ABSL_FLAG(int, failures, 10, "stop after so many failures");
ABSL_FLAG(int, shrinks, 120, "runs to make a failure smaller");
ABSL_FLAG(int, repeat, 1, "run --program so many times");
ABSL_FLAG(bool, verbose, false, "print every program before it runs");

namespace fsdp::testing {
namespace {

absl::StatusOr<FuzzOptions> ReadOptions() {
  FuzzOptions options;
  const std::pair<std::string, std::string> seeds =
      absl::StrSplit(absl::GetFlag(FLAGS_seeds), absl::MaxSplits(':', 1));
  if (!absl::SimpleAtoi(seeds.first, &options.begin) ||
      !absl::SimpleAtoi(seeds.second, &options.end)) {
    return absl::InvalidArgumentError("--seeds is BEGIN:END");
  }
  if (absl::GetFlag(FLAGS_seed) >= 0) {
    options.begin = static_cast<uint32_t>(absl::GetFlag(FLAGS_seed));
    options.end = options.begin + 1;
  }
  options.limit = absl::Seconds(absl::GetFlag(FLAGS_seconds));
  options.max_failures = absl::GetFlag(FLAGS_failures);
  options.max_shrinks = absl::GetFlag(FLAGS_shrinks);
  options.verbose =
      absl::GetFlag(FLAGS_verbose) || absl::GetFlag(FLAGS_seed) >= 0;
  options.draw.off =
      absl::StrSplit(absl::GetFlag(FLAGS_off), ',', absl::SkipEmpty());
  FSDP_ASSIGN_OR_RETURN(options.draw.set,
                        ParseSettings(absl::GetFlag(FLAGS_set)));
  options.draw.held = absl::GetFlag(FLAGS_held);
  return options;
}

int RunOneProgram(const ProgramRun& run) {
  const absl::StatusOr<Program> program =
      ParseProgram(absl::GetFlag(FLAGS_program));
  if (!program.ok()) {
    std::fprintf(stderr, "%s\n", program.status().ToString().c_str());
    return 2;
  }
  std::fprintf(stderr, "%s\n", ToString(*program).c_str());
  int failures = 0;
  const int times = absl::GetFlag(FLAGS_repeat);
  for (int i = 0; i < times; ++i) {
    const ProgramOutcome outcome = run(*program);
    if (!outcome.text.empty())
      std::fprintf(stderr, "%s\n", outcome.text.c_str());
    failures += outcome.is_failure() ? 1 : 0;
  }
  std::fprintf(stderr, "%d of %d runs failed\n", failures, times);
  return failures > 0 ? 1 : 0;
}

int Main() {
  const absl::StatusOr<FuzzOptions> options = ReadOptions();
  if (!options.ok()) {
    std::fprintf(stderr, "%s\n", options.status().ToString().c_str());
    return 2;
  }
  const std::string scratch =
      absl::StrCat(std::filesystem::temp_directory_path().string(),
                   "/program_fuzz.", getpid());
  std::filesystem::create_directories(scratch);
  const ProgramRun run = [&](const Program& program) {
    // Names the current program, in case the process dies.
    std::ofstream(scratch + "/now") << ToString(program) << "\n";
    return RunProgram(program, scratch);
  };
  std::fprintf(stderr, "should this end halfway, %s/now has the program\n",
               scratch.c_str());
  int code = 0;
  if (!absl::GetFlag(FLAGS_program).empty()) {
    code = RunOneProgram(run);
  } else {
    code = Fuzz(*options, run).failures.empty() ? 0 : 1;
  }
  std::filesystem::remove_all(scratch);
  return code;
}

}  // namespace
}  // namespace fsdp::testing

int main(int argc, char** argv) {
  fsdp::ParseCommandLine(
      argc, argv,
      "Runs random training programs, sharded and with plain LibTorch, and "
      "compares all numbers.\nExits with 1 where one differs or fails, after "
      "printing it as small as it gets.",
      "program_fuzz.cc");
  return fsdp::testing::Main();
}
