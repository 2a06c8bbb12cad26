// Random training programs, sharded and plain:
//   ./bazelw run //fsdp/testing/program:program_fuzz -- --seeds=0:1000
//   ./bazelw run //fsdp/testing/program:program_fuzz -- --help
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/launcher/launcher.h"
#include "comm/startup/environment.h"
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
          "features with a value of their own: \"micro=2,step0.style=retain\"");
ABSL_FLAG(std::string, held, "",
          "features to draw although they are known to fail: \"all\" or names; "
          "\"list\" prints them");
ABSL_FLAG(int, ranks, 0, "so many ranks; 0: drawn");
ABSL_FLAG(
    std::string, backend, "drawn",
    "drawn, local, shared, gloo, shared_hosts, local_hosts, or processes: "
    "ranks are processes that share memory");
ABSL_FLAG(int, failures, 10, "stop after so many failures");
ABSL_FLAG(int, shrinks, 120, "runs to make a failure smaller");
ABSL_FLAG(int, repeat, 1, "run --program so many times");
ABSL_FLAG(bool, verbose, false, "print every program before it runs");
ABSL_FLAG(std::string, batch_of_rank, "",
          "for processes that this program starts itself");

namespace fsdp::testing {
namespace {

// --- Programs whose ranks are processes

std::string ReportOf(const std::string& file, int rank) {
  return absl::StrCat(file, ".", rank);
}

absl::Status WritePrograms(const std::string& file,
                           const std::vector<Program>& programs) {
  std::ofstream out(file, std::ios::trunc);
  for (const Program& program : programs) out << ToString(program) << "\n";
  out.close();
  if (out.good()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", file));
}

// Returns one of the ranks' reports that is not a consequence of another.
BatchEnd CauseOf(const std::string& file, const comm::LaunchReport& report) {
  BatchEnd cause{0, {ProgramOutcome::kFails, report.ToString()}};
  bool found = false;
  for (size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const absl::StatusOr<BatchEnd> end =
        ReadBatchEnd(ReportOf(file, static_cast<int>(rank)));
    if (!end.ok() || !end->outcome.is_failure()) continue;
    const bool echo = absl::StrContains(end->outcome.text, "ABORTED");
    if (found && echo) continue;
    cause = *end;
    absl::StrAppend(&cause.outcome.text, " (", report.ToString(), ")");
    found = !echo;
  }
  return cause;
}

// Starts this executable once per rank with --batch_of_rank=FILE. Returns the
// end of the first rank that failed. The programs must have equally many ranks;
// refused ones are passed over. Must be called before LibTorch is used, in a
// process with one thread.
BatchEnd RunInProcesses(const std::vector<Program>& programs,
                        const std::string& scratch) {
  const std::string folder = absl::StrCat(scratch, "/batch");
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string file = absl::StrCat(folder, "/programs");
  const absl::Status written = WritePrograms(file, programs);
  if (!written.ok()) return {0, OutcomeOf(written)};
  comm::LaunchOptions options;
  options.ranks = programs.front().ranks;
  options.argv = {"program_fuzz", absl::StrCat("--batch_of_rank=", file)};
  options.stdout_fd = 2;
  const absl::StatusOr<comm::LaunchReport> report = comm::LaunchRanks(options);
  if (!report.ok()) return {0, OutcomeOf(report.status())};
  if (report->interrupt_signal != 0) std::exit(report->exit_code());
  if (report->exit_code() == 0) return {programs.size(), ProgramOutcome()};
  return CauseOf(file, *report);
}

// Runs such a process and returns its exit code.
int RunRankOfBatch(const std::string& file) {
  const absl::StatusOr<comm::Environment> environment =
      comm::ReadEnvironment(std::getenv);
  if (!environment.ok()) return 2;
  std::vector<Program> programs;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const absl::StatusOr<Program> program = ParseProgram(line);
    if (!program.ok()) return 2;
    programs.push_back(*program);
  }
  const std::string report = ReportOf(file, environment->rank);
  const BatchEnd end = RunBatchAsRank(
      programs, std::filesystem::path(file).parent_path().string(), report);
  if (!WriteBatchEnd(report, end).ok()) return 2;
  return end.outcome.is_failure() ? 1 : 0;
}

// --- Flags

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
  std::string forced;
  if (absl::GetFlag(FLAGS_ranks) > 0) {
    absl::StrAppend(&forced, "ranks=", absl::GetFlag(FLAGS_ranks));
  }
  const std::string backend = absl::GetFlag(FLAGS_backend);
  if (backend == "processes") {
    absl::StrAppend(&forced, " group=shared");
    if (absl::GetFlag(FLAGS_ranks) == 0) absl::StrAppend(&forced, " ranks=2");
    options.batch = 20;
  } else if (backend != "drawn") {
    absl::StrAppend(&forced, " group=", backend);
  }
  FSDP_ASSIGN_OR_RETURN(const auto more, ParseSettings(forced));
  for (const auto& [name, value] : more) options.draw.set[name] = value;
  for (const auto& [name, text] : Held()) {
    const std::string held = absl::GetFlag(FLAGS_held);
    const std::vector<std::string> names = absl::StrSplit(held, ',');
    if (held == "all" ||
        std::find(names.begin(), names.end(), name) != names.end()) {
      options.draw.held.insert(name);
    }
  }
  return options;
}

int RunOneProgram(const BatchRun& run) {
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
    const ProgramOutcome outcome = run({*program}).outcome;
    if (!outcome.text.empty())
      std::fprintf(stderr, "%s\n", outcome.text.c_str());
    failures += outcome.is_failure() ? 1 : 0;
  }
  std::fprintf(stderr, "%d of %d runs failed\n", failures, times);
  return failures > 0 ? 1 : 0;
}

int Main() {
  if (!absl::GetFlag(FLAGS_batch_of_rank).empty()) {
    return RunRankOfBatch(absl::GetFlag(FLAGS_batch_of_rank));
  }
  if (absl::GetFlag(FLAGS_held) == "list") {
    for (const auto& [name, text] : Held()) {
      std::printf("%s: %s\n", name.c_str(), text.c_str());
    }
    return 0;
  }
  const absl::StatusOr<FuzzOptions> options = ReadOptions();
  if (!options.ok()) {
    std::fprintf(stderr, "%s\n", options.status().ToString().c_str());
    return 2;
  }
  const std::string scratch =
      absl::StrCat(std::filesystem::temp_directory_path().string(),
                   "/program_fuzz.", getpid());
  std::filesystem::create_directories(scratch);
  const BatchRun run = [&](const std::vector<Program>& programs) -> BatchEnd {
    if (absl::GetFlag(FLAGS_backend) == "processes") {
      return RunInProcesses(programs, scratch);
    }
    // Names the current program, in case the process dies.
    std::ofstream(scratch + "/now") << ToString(programs[0]) << "\n";
    ProgramOutcome outcome = RunProgram(programs[0], scratch);
    const bool same = outcome.kind == ProgramOutcome::kSame;
    return {same ? size_t{1} : size_t{0}, std::move(outcome)};
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
  absl::SetProgramUsageMessage(
      "Runs random training programs, sharded and with plain LibTorch, and "
      "compares all numbers.\nExits with 1 where one differs or fails, after "
      "printing it as small as it gets.");
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [](absl::string_view file) {
    return absl::StrContains(file, "program_fuzz");
  };
  absl::SetFlagsUsageConfig(config);
  absl::ParseCommandLine(argc, argv);
  return fsdp::testing::Main();
}
