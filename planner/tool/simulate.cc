// Predicts training steps without running them:
//   ./bazelw run //planner/tool:simulate -- --help
#include <cerrno>
#include <cstdio>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "planner/simulator/simulator.h"
#include "planner/tool/command_line.h"

namespace fsdp::simulator {
namespace {

absl::Status Run(int argc, char** argv) {
  FSDP_ASSIGN_OR_RETURN(Settings settings, ParseFlags(argc, argv));
  Scenario& scenario = settings.scenario;
  FSDP_ASSIGN_OR_RETURN(scenario.model, MakeGpt(settings.gpt));
  std::vector<StepResult> rows;
  for (const int ranks : settings.ranks) {
    scenario.sharding.ranks = ranks;
    FSDP_ASSIGN_OR_RETURN(
        rows.emplace_back(),
        Annotate(Simulate(scenario),
                 absl::StrCat("a step on ", ranks, " ranks")));
  }
  absl::PrintF("%d units, %.2f million parameters\n\n%s",
               scenario.model.units.size(),
               static_cast<double>(scenario.model.num_elements()) / 1e6,
               StepTable(rows));
  if (std::fflush(stdout) != 0) {
    return absl::ErrnoToStatus(errno, "writing to standard output");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace fsdp::simulator

int main(int argc, char** argv) {
  const absl::Status status = fsdp::simulator::Run(argc, argv);
  if (status.ok()) return 0;
  absl::FPrintF(stderr, "simulate: %s\n", status.message());
  return 1;
}
