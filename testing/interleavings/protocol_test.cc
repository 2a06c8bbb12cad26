// The cases keep their promises, and see what they are there for: each place
// where the protocol synchronizes is weakened, one at a time, and some case has
// to find it, unless the place is in the list of those where nothing can be
// seen.
#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/interleavings/checker.h"
#include "testing/interleavings/mutation.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {
namespace {

using ::testing::IsEmpty;

class ProtocolTest : public ::testing::TestWithParam<int> {};

// Also prints how much was explored, which is part of what passing means.
TEST_P(ProtocolTest, KeepsItsPromises) {
  for (const Case& c : AllCases(GetParam())) {
    const CheckResult result = Explore(c.scenario, c.options);
    std::cout << GetParam() << " ranks, " << c.name << ": " << result << "\n"
              << std::flush;
    EXPECT_THAT(result.violation, IsEmpty()) << c.name;
    EXPECT_GT(result.completed, 1) << c.name;
  }
}

INSTANTIATE_TEST_SUITE_P(OfRanks, ProtocolTest, ::testing::Values(2, 3));

// Mutations that nobody can see, and why nothing is lost by each.
const std::map<std::string, std::string>& Equivalent() {
  constexpr char kCountOnly[] =
      "only the count matters: what is mapped anew is found by its identity";
  constexpr char kNames[] =
      "it says whom an error names; what is done follows from other looks";
  static const auto* const reasons = new std::map<std::string, std::string>{
      {"MakeHeap's lambda: update of frees, release -> relaxed", kCountOnly},
      {"SharedHost::ForgetWhatPeersFreed: load of frees, acquire -> relaxed",
       kCountOnly},
      {"SharedGroup::IsMissing: load of arrived, acquire -> relaxed", kNames},
      {"SharedGroup::IsMissing: load of read, acquire -> relaxed", kNames},
      {"SharedGroup::IsMissing: load of staged, acquire -> relaxed", kNames},
      {"SharedGroup::StageWhatFits: load of staged, acquire -> relaxed",
       "it is what the rank itself has stored"},
      {"SharedGroup::EchoFailure: call of rings -> nothing",
       "who failed first has rung for all"},
      {"SharedGroup::FailToRead: call of rings -> nothing",
       "others see for themselves that the rank has ended or that time has "
       "passed"},
      {"SharedGroup::FailsWithPeers: call of rings -> nothing",
       "others look for themselves whether a process has ended"},
      {"SharedGroup::PassOrFail: call of rings -> nothing",
       "time has passed for all"},
      {"SharedGroup::Match: call of rings -> nothing",
       "every rank compares for itself"},
  };
  return *reasons;
}

struct Explored {
  Case c;
  Sites sites;
};

// Returns the name of the case that has found it, "" if none has.
std::string FoundBy(const Mutation& mutation,
                    const std::vector<Explored>& cases) {
  for (const Explored& explored : cases) {
    const bool is_reached =
        std::any_of(mutation.sites.begin(), mutation.sites.end(),
                    [&](uintptr_t site) { return explored.sites.count(site); });
    if (!is_reached) continue;
    CheckOptions options = explored.c.options;
    options.mutation = &mutation;
    const CheckResult result = Explore(explored.c.scenario, options);
    if (!result.violation.empty()) {
      return explored.c.name + ": " + result.violation;
    }
  }
  return "";
}

TEST(MutationTest, WhatMattersIsFound) {
  std::vector<Explored> cases;
  Sites sites;
  for (Case& c : AllCases(2)) {
    // Mutations that are found are found early.
    c.options.max_preemptions = std::min(c.options.max_preemptions, 1);
    CheckResult result = Explore(c.scenario, c.options);
    ASSERT_THAT(result.violation, IsEmpty()) << c.name;
    sites.insert(result.sites.begin(), result.sites.end());
    cases.push_back({std::move(c), std::move(result.sites)});
  }
  const std::vector<Mutation> mutations = AllMutations(sites);
  EXPECT_GT(mutations.size(), 30u);
  for (const Mutation& mutation : mutations) {
    const auto reason = Equivalent().find(mutation.name);
    const std::string found = FoundBy(mutation, cases);
    std::cout << mutation.name << ": "
              << (found.empty() ? "NOT FOUND" : found.substr(0, 120)) << "\n"
              << std::flush;
    if (reason == Equivalent().end()) {
      EXPECT_NE(found, "") << mutation.name;
    } else {
      EXPECT_EQ(found, "") << mutation.name << " is found after all, though "
                           << reason->second;
    }
  }
}

}  // namespace
}  // namespace fsdp::interleavings
