#include "testing/interleavings/checker.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_format.h"

namespace fsdp::interleavings {
namespace {

void Execute(const MakeScenario& make, Machine& machine, Search& search,
             CheckResult* result) {
  machine.Reset();
  const std::unique_ptr<Scenario> scenario = make();
  scenario->SetUp(machine);
  machine.Run(search);
  ++result->executions;
  result->steps = std::max(result->steps, machine.num_steps());
  if (machine.has_completed() && machine.violation().empty()) {
    ++result->completed;
    scenario->Check(machine);
  }
  if (machine.violation().empty()) return;
  result->violation = machine.violation();
  result->trace = machine.DescribeTrace();
}

}  // namespace

CheckResult Explore(const MakeScenario& make, const CheckOptions& options) {
  // The time of a machine stands still: this is read before there is one.
  const auto begin = std::chrono::steady_clock::now();
  CheckResult result;
  {
    Machine machine(options.machine, options.mutation);
    Search search(options.max_preemptions);
    do {
      Execute(make, machine, search, &result);
    } while (search.Finish(machine.PendingSteps()) && result.violation.empty());
    result.sites = machine.sites();
  }
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  result.seconds = took.count();
  return result;
}

std::ostream& operator<<(std::ostream& out, const CheckResult& result) {
  out << absl::StrFormat(
      "%d executions (%d complete) of up to %d steps in %.2f s",
      result.executions, result.completed, result.steps, result.seconds);
  if (result.violation.empty()) return out;
  return out << "\n" << result.violation << "\n" << result.trace;
}

void Violate(std::string what) { Machine::Current()->Violate(std::move(what)); }

}  // namespace fsdp::interleavings
