#include <iostream>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/interleavings/cases.h"
#include "testing/interleavings/checker.h"

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
    EXPECT_TRUE(result.is_complete) << c.name;
    EXPECT_GT(result.completed, 1) << c.name;
  }
}

INSTANTIATE_TEST_SUITE_P(OfRanks, ProtocolTest, ::testing::Values(2, 3));

}  // namespace
}  // namespace fsdp::interleavings
