// Explores further than the tests do:
//   bazel run -c opt //testing/interleavings -- --ranks=3 --preemptions=2
#include <cstdio>
#include <iostream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "base/command_line.h"
#include "testing/interleavings/checker.h"
#include "testing/interleavings/scenarios.h"

ABSL_FLAG(int, ranks, 2, "2 or 3");
ABSL_FLAG(int, preemptions, -2,
          "how often a thread is interrupted at most, in an execution; -1: any "
          "number; -2: as the tests have it");
ABSL_FLAG(std::string, cases, "", "only cases whose names contain this");

namespace fsdp::interleavings {
namespace {

constexpr int kAsTests = -2;

int Main() {
  const int ranks = absl::GetFlag(FLAGS_ranks);
  if (ranks != 2 && ranks != 3) {
    std::fprintf(stderr, "--ranks=%d: 2 or 3\n", ranks);
    return 2;
  }
  int num_violations = 0;
  for (Case& c : AllCases(ranks)) {
    if (!absl::StrContains(c.name, absl::GetFlag(FLAGS_cases))) continue;
    const int preemptions = absl::GetFlag(FLAGS_preemptions);
    if (preemptions != kAsTests) c.options.max_preemptions = preemptions;
    const CheckResult result = Explore(c.scenario, c.options);
    std::cout << c.name << ": " << result << std::endl;
    if (!result.violation.empty()) ++num_violations;
  }
  return num_violations == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fsdp::interleavings

int main(int argc, char** argv) {
  fsdp::ParseCommandLine(
      argc, argv, "explores the interleavings of ranks that share memory",
      "testing/interleavings/main.cc");
  return fsdp::interleavings::Main();
}
