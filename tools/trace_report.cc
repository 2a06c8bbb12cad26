// Sums up and draws what fsdp::Trace has recorded.
//   bazel run //tools:trace_report -- --svg=step.svg trace.json
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
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
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "tools/drawing/lane_chart.h"
#include "tools/trace/breakdown.h"
#include "tools/trace/picture.h"
#include "tools/trace/report.h"
#include "tools/trace/trace_file.h"

ABSL_FLAG(std::string, svg, "", "Draw a step into this file.");
ABSL_FLAG(std::string, csv, "", "Write all sums to this file.");
ABSL_FLAG(std::string, step, "",
          "The step to draw; default: the last that all ranks have.");
ABSL_FLAG(std::vector<std::string>, ranks, {},
          "The ranks to draw, separated by commas; default: the first four.");

namespace fsdp::trace_report {
namespace {

// What the user meant, also under `bazel run`.
std::string ResolvePath(const std::string& path) {
  const char* directory = std::getenv("BUILD_WORKING_DIRECTORY");
  if (path.empty() || directory == nullptr) return path;
  return std::filesystem::path(directory) / path;
}

absl::StatusOr<PictureOptions> ReadPictureOptions() {
  PictureOptions options;
  const std::string step = absl::GetFlag(FLAGS_step);
  int64_t number = 0;
  if (!step.empty()) {
    if (!absl::SimpleAtoi(step, &number)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--step=", step, ": expected the number of a step"));
    }
    options.step = number;
  }
  for (const std::string& text : absl::GetFlag(FLAGS_ranks)) {
    int rank = 0;
    if (!absl::SimpleAtoi(text, &rank)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--ranks: \"", text, "\" is no rank; expected numbers and commas"));
    }
    options.ranks.push_back(rank);
  }
  return options;
}

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
  FSDP_ASSIGN_OR_RETURN(const PictureOptions picture, ReadPictureOptions());
  FSDP_ASSIGN_OR_RETURN(const std::vector<RankTrace> traces, ReadTraces(paths));
  const std::vector<StepTimes> steps = BreakDown(traces);
  if (!(std::cout << ToText(traces, steps) << std::flush)) {
    return absl::ErrnoToStatus(errno, "writing to standard output");
  }
  const std::string csv = ResolvePath(absl::GetFlag(FLAGS_csv));
  if (!csv.empty()) FSDP_RETURN_IF_ERROR(WriteOutputFile(csv, ToCsv(steps)));
  const std::string svg = ResolvePath(absl::GetFlag(FLAGS_svg));
  if (svg.empty()) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const drawing::LaneChart chart,
                        DrawStep(traces, steps, picture));
  return WriteOutputFile(svg, drawing::ToSvg(chart));
}

int Main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "Says where the time of traced training steps has gone.\n\n"
      "  bazel run //tools:trace_report -- --svg=step.svg trace.json");
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
