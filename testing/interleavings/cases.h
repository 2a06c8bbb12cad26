// What is explored, by name, with the bounds that keep it short.
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
};

// Of 2 or 3 ranks.
std::vector<Case> AllCases(int ranks);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_CASES_H_
