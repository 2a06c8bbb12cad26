#include "fsdp/testing/program/program_processes.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "comm/launcher/launcher.h"
#include "comm/startup/environment.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_outcome.h"
#include "fsdp/testing/program/program_runner.h"

namespace fsdp::testing {
namespace {

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

}  // namespace

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

}  // namespace fsdp::testing
