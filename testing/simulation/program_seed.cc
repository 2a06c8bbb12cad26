#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"
#include "fsdp/testing/program/sharded_program.h"
#include "testing/simulation/group.h"
#include "testing/simulation/mutant.h"
#include "testing/simulation/network.h"
#include "testing/simulation/scenario.h"
#include "testing/simulation/seed_run.h"
#include "testing/simulation/simulation.h"
#include "testing/simulation/warnings.h"

namespace fsdp::simulation {
namespace {

using ::fsdp::testing::OutcomeOf;
using ::fsdp::testing::Program;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::ProgramRecord;

Program DrawSimulatedProgram(uint64_t seed) {
  ::fsdp::testing::DrawOptions options;
  // The system's queues would write files of tiers, and ranks are late in
  // simulated time.
  options.off = {"rest_parameters",
                 "rest_gradients",
                 "rest_states",
                 "budget",
                 "keep",
                 "late",
                 "yields",
                 "offload_activations",
                 "hosts"};
  return ::fsdp::testing::DrawProgram(static_cast<uint32_t>(seed), options);
}

// Returns the first error that is not an echo of another one.
absl::Status FirstError(const std::vector<absl::Status>& statuses) {
  absl::Status first;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    const absl::Status& status = statuses[rank];
    if (status.ok()) continue;
    const bool is_echo = absl::IsAborted(status) || absl::IsUnavailable(status);
    if (!first.ok() && is_echo) continue;
    first = Annotate(status, absl::StrCat("rank ", rank));
    if (!is_echo) break;
  }
  return first;
}

}  // namespace

SeedResult RunProgramSeed(uint64_t seed, const SeedOptions& options) {
  const Program program = DrawSimulatedProgram(seed);
  ProgramRecord record;
  SeedResult result;
  const absl::Status plain = TorchToStatus(
      "the plain program", [&] { record = RunPlainProgram(program); });
  if (!plain.ok()) {
    result.problem = plain.ToString();
    return result;
  }
  Simulation simulation({seed, options.keep_log});
  simulation.Enter();
  {
    Network network(simulation, DrawNetwork(seed));
    std::vector<int> processes(program.ranks);
    std::iota(processes.begin(), processes.end(), 0);
    auto ranks = CreateSimulatedGroup(network, processes);
    std::vector<absl::Status> statuses(program.ranks);
    std::vector<std::function<void()>> bodies;
    bodies.reserve(program.ranks);
    for (int rank = 0; rank < program.ranks; ++rank) {
      bodies.emplace_back([&, rank] {
        const std::unique_ptr<comm::Communicator> world =
            Mutate(std::move(ranks[rank]), options.mutant);
        absl::Status& status = statuses[rank];
        Warnings warnings(simulation);
        const absl::Status thrown = TorchToStatus("training", [&] {
          status = RunShardedProgram(program, record, *world, options.scratch);
        });
        if (!thrown.ok()) status = thrown;
        if (!status.ok()) world->Abort(status);
      });
    }
    simulation.RunProcesses(bodies);
    const ProgramOutcome outcome = OutcomeOf(FirstError(statuses));
    if (outcome.is_failure()) result.problem = outcome.text;
    if (!simulation.violation().empty()) {
      result.problem = simulation.violation();
    }
    result.features = {outcome.kind == ProgramOutcome::kRefused ? "refused"
                                                                : "program"};
  }
  simulation.Leave();
  if (!result.problem.empty()) {
    absl::StrAppend(&result.problem, "\n  ", ToString(program));
  }
  result.log_hash = simulation.log_hash();
  result.log = simulation.log();
  result.events = simulation.events();
  return result;
}

}  // namespace fsdp::simulation
