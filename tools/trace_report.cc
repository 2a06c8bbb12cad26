// Sums up what fsdp::Trace has recorded.
//   bazel run //tools:trace_report -- --csv=sums.csv trace.json
#include <cerrno>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "tools/trace/report.h"
#include "tools/trace/trace_file.h"

ABSL_FLAG(std::string, csv, "", "Write all sums to this file.");

namespace fsdp::trace_report {
namespace {

absl::Status Run(const std::vector<char*>& arguments) {
  std::vector<std::string> paths;
  for (size_t i = 1; i < arguments.size(); ++i) {
    paths.push_back(ResolvePath(arguments[i]));
  }
  if (paths.empty()) {
    return absl::InvalidArgumentError(
        "no trace is given: name the files that --trace or fsdp::WriteTrace() "
        "wrote, of one run");
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<RankTrace> traces, ReadTraces(paths));
  const std::vector<StepTimes> steps = BreakDown(traces);
  if (!(std::cout << ToText(traces, steps) << std::flush)) {
    return absl::ErrnoToStatus(errno, "writing to standard output");
  }
  const std::string csv = ResolvePath(absl::GetFlag(FLAGS_csv));
  if (csv.empty()) return absl::OkStatus();
  return WriteOutputFile(csv, ToCsv(steps));
}

int Main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "Says where the time of traced training steps has gone.\n\n"
      "  bazel run //tools:trace_report -- --csv=sums.csv trace.json");
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "tools/trace_report.cc");
  };
  absl::SetFlagsUsageConfig(config);
  const absl::Status status = Run(absl::ParseCommandLine(argc, argv));
  if (status.ok()) return EXIT_SUCCESS;
  std::cerr << status << std::endl;
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace fsdp::trace_report

int main(int argc, char** argv) { return fsdp::trace_report::Main(argc, argv); }
