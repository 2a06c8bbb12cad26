// Explores a scenario: threads of ranks that run the real code.
#ifndef TESTING_INTERLEAVINGS_CHECKER_H_
#define TESTING_INTERLEAVINGS_CHECKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "testing/interleavings/machine.h"
#include "testing/interleavings/mutation.h"
#include "testing/interleavings/search.h"

namespace fsdp::interleavings {

// One execution. It has to do the same whenever it is executed, apart from what
// its threads learn from each other.
class Scenario {
 public:
  virtual ~Scenario() = default;
  // Adds threads; nobody runs yet.
  virtual void SetUp(Machine& machine) = 0;
  // All threads have ended, except those of a killed rank.
  virtual void Check(Machine&) {}
};
using MakeScenario = std::function<std::unique_ptr<Scenario>()>;

struct CheckOptions {
  MachineOptions machine;
  int max_preemptions = Search::kUnbounded;
  // Null for the code as it is.
  const Mutation* mutation = nullptr;
};

struct CheckResult {
  int64_t executions = 0;  // also those that were given up as explored before
  int64_t completed = 0;
  int64_t steps = 0;  // of the longest execution
  double seconds = 0;
  std::string violation;  // the first one; empty: none, and all was explored
  std::string trace;      // what led to it
  Sites sites;
};

CheckResult Explore(const MakeScenario& make, const CheckOptions& options);

// Writes "1234 executions (1200 complete) of up to 210 steps in 0.5 s".
std::ostream& operator<<(std::ostream& out, const CheckResult& result);

// Threads call it when what they see is wrong.
void Violate(std::string what);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_CHECKER_H_
