#include "base/testing/check_that.h"

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

TEST(CheckThatTest, ShowsTheValue) {
  EXPECT_OK(CheckThat(3, 3, "steps"));
  EXPECT_THAT(
      CheckThat(2.5, ::testing::DoubleNear(3, 0.25), "norm"),
      StatusIs(absl::StatusCode::kInternal,
               ::testing::MatchesRegex(
                   "norm: expected what .* 3.*, got 2.5, which is -0.5 from "
                   "3")));
}

}  // namespace
}  // namespace fsdp::testing
