#include "replicas/membership/roster.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

std::string TextAfterStep(const std::string& roster,
                          const std::vector<std::string>& notices,
                          int64_t seen) {
  std::vector<Notice> pending;
  for (const std::string& notice : notices) {
    pending.push_back(DecodeNotice(notice).value());
  }
  return Encode(AfterStep(DecodeRoster(roster).value(), pending, seen));
}

// The other rules are those of explorer_test.
TEST(AfterStepTest, TheLastJoinOfEachReplicaCountsIfSomebodyStays) {
  EXPECT_EQ(TextAfterStep("4 2 3 5 finished 0.0 1.1",
                          {"join 1.0 0", "join 3.1 4", "join 1.1 0",
                           "join 3.0 1", "join 2.0 1", "leave 2.0"},
                          9),
            "5 3 4 9 finished 0.0 1.1 3.1*");
  // A notice that waits is for the founding that follows.
  EXPECT_EQ(
      TextAfterStep("4 2 3 5 finished 0.0", {"join 0.1 4", "join 1.0 4"}, 7),
      "5 3 4 5 finished");
  const Notice join = {Notice::Kind::kJoin, {3, 0}, 1};
  const Notice again = {Notice::Kind::kJoin, {3, 0}, 4};
  EXPECT_EQ(Waiting({join, again}).at(0).first_step, 4);
}

TEST(CodecTest, LimitsAreIncluded) {
  const std::string most =
      std::to_string(std::numeric_limits<int64_t>::max() / 2);
  std::string all =
      absl::StrCat(most, " ", most, " ", most, " ", most, " lost");
  for (int i = 0; i < kMaxReplicas; ++i) {
    absl::StrAppend(&all, " ", i, ".2147483647", i % 2 == 0 ? "" : "*");
  }
  for (const std::string& text : {all, std::string("1 0 0 0 lost")}) {
    ASSERT_OK_AND_ASSIGN(const Roster roster, DecodeRoster(text));
    EXPECT_EQ(Encode(roster), text);
  }
  const std::string join = absl::StrCat("join 1023.2147483647 ", most);
  ASSERT_OK_AND_ASSIGN(const Notice notice, DecodeNotice(join));
  EXPECT_EQ(Encode(notice), join);
}

TEST(CodecTest, WhatNoRuleMakesIsRefused) {
  const std::string cases[][2] = {
      {"", "too short"},
      {"1 0 0 0", "too short"},
      {"1 0 0 0 lost ", "member"},
      {"1 0 0 0 found 0.0", "cause"},
      {"-1 -1 0 0 lost", "number"},
      {"1 0 x 0 lost", "number"},
      {"1 0 4611686018427387904 0 lost", "number"},
      {"1 0 99999999999999999999 0 lost", "number"},
      {"1 2 0 0 lost", "epoch"},
      {"1 0 0 0 lost 1.0 0.0", "order"},
      {"1 0 0 0 lost 1.0 1.1", "order"},
      {"1 0 0 0 lost 1024.0", "member"},
      {"1 0 0 0 lost -1.0", "member"},
      {"1 0 0 0 lost 0.-1", "member"},
      {"1 0 0 0 lost 0.2147483648", "member"},
      {"1 0 0 0 lost 0", "member"},
      {"1 0 0 0 lost 0.0.0", "member"},
      {"1 0 0 0 lost 0.0**", "member"},
      {"1 0 0 0 lost 00.0", "member"},
      {"1 0 0 0 lost 0.0* 1.0*", "new"},
      {"1 0 0 0 founded", "donor"},
      {"1 0 0 0 founded 0.0 1.0", "donor"},
      {"0 0 1 0 finished 0.0", "founding"},
      {"1 0 0 0 finished 0.0", "finished"},
      {"01 0 0 0 lost", "otherwise"},
      {"+1 0 0 0 lost", "otherwise"},
  };
  for (const auto& [text, why] : cases) {
    EXPECT_THAT(DecodeRoster(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)))
        << text;
  }
  EXPECT_THAT(DecodeRoster(std::string(kMaxRosterBytes + 1, '1')),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("long")));
  EXPECT_THAT(
      DecodeNotice("join 2.1 4611686018427387904"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("join 2.1 46")));
}

}  // namespace
}  // namespace fsdp::replicas
