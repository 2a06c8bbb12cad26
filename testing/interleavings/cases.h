// Scenarios that are explored, by name, with bounds that keep them short.
#ifndef TESTING_INTERLEAVINGS_CASES_H_
#define TESTING_INTERLEAVINGS_CASES_H_

#include <string>
#include <vector>

#include "testing/interleavings/checker.h"

namespace fsdp::interleavings {

struct Case {
  std::string name;
  MakeScenario scenario;
  CheckOptions options;
  // Is quick and sees what others would, so that it is run with mutations.
  bool is_for_mutations = false;
};

// Returns the cases of 2 or 3 ranks.
std::vector<Case> AllCases(int ranks);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_CASES_H_
