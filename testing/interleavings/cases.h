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
  // Quick, and sees what others would: with which the code is weakened.
  bool is_for_mutations = false;
};

// Of 2 or 3 ranks.
std::vector<Case> AllCases(int ranks);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_CASES_H_
