#include "comm/group/failure_report.h"

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "comm/call.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Reports = std::vector<std::optional<RankReport>>;

const RankReport kLostHere = {Cause::kLost, "lost rank 2", "is in #4"};
const RankReport kEchoThere = {Cause::kEcho, "told", "has finished #3"};

TEST(FailureReportTest, EncodingIsUndone) {
  const RankReport report = {Cause::kLeft, "two\nlines", "is in #1 of a"};
  const auto decoded = Decode(Encode(report));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->cause, report.cause);
  EXPECT_EQ(decoded->text, report.text);
  EXPECT_EQ(decoded->position, report.position);
}

TEST(FailureReportTest, OtherTextsAreNoReports) {
  for (absl::string_view text : {"", "3", "x\na\nb", "-1\na\nb", "6\na\nb"}) {
    EXPECT_FALSE(Decode(text).has_value()) << text;
  }
}

TEST(FailureReportTest, LongTextsAreCut) {
  RankReport report;
  report.text = std::string(100'000, 'x');
  EXPECT_LT(Encode(report).size(), 4096u);
}

TEST(FailureReportTest, AnAbortExplainsEverything) {
  const Reports reports = {kLostHere,
                           RankReport{Cause::kAbort, "disk full", "is in #4"},
                           std::nullopt};
  EXPECT_TRUE(Explains(reports));
  EXPECT_THAT(
      Verdict(0, RankNames(3), reports, true),
      StatusIs(absl::StatusCode::kAborted, "rank 1 aborted: disk full"));
}

TEST(FailureReportTest, AMismatchExplainsLostConnections) {
  const Reports reports = {
      kLostHere, RankReport{Cause::kMismatch, "calls differ", "is in #4"}};
  EXPECT_TRUE(Explains(reports));
  EXPECT_THAT(Verdict(0, RankNames(2), reports, true),
              StatusIs(absl::StatusCode::kInvalidArgument, "calls differ"));
}

TEST(FailureReportTest, TheRankThatWaitedTellsWhereTheOthersAre) {
  const Reports reports = {RankReport{Cause::kDeadline, "too late", "is in #4"},
                           kEchoThere, std::nullopt};
  EXPECT_FALSE(Explains(reports));
  const auto elsewhere =
      AllOf(HasSubstr("too late; rank"),
            HasSubstr("rank 2 does not answer: dead, stopped or cut off"));
  EXPECT_THAT(Verdict(0, RankNames(3), reports, true),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(elsewhere, HasSubstr("rank 1 has finished #3"))));
  EXPECT_THAT(Verdict(1, RankNames(3), reports, true),
              StatusIs(absl::StatusCode::kAborted,
                       AllOf(elsewhere,
                             StartsWith("rank 0, which is in #4, gave up: "))));
}

TEST(FailureReportTest, ALostConnectionNamesWhoIsSilentAndWhoHasLeft) {
  const Reports silent = {kLostHere, kEchoThere, std::nullopt, std::nullopt};
  EXPECT_THAT(Verdict(0, RankNames(4), silent, true),
              StatusIs(absl::StatusCode::kUnavailable,
                       "lost rank 2; rank 1 has finished #3; rank 2, rank 3 do "
                       "not answer: dead, stopped or cut off"));
  const Reports left = {kLostHere,
                        RankReport{Cause::kLeft, "", "has finished #3"}};
  EXPECT_TRUE(Explains(left));
  EXPECT_THAT(Verdict(0, RankNames(2), left, true),
              StatusIs(absl::StatusCode::kUnavailable,
                       "lost rank 2; rank 1 has left the group: it has "
                       "finished #3"));
}

TEST(FailureReportTest, WithoutTheStoreNobodyIsAccused) {
  EXPECT_THAT(Verdict(0, RankNames(2), Reports{kLostHere, std::nullopt}, false),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("nothing is known of rank 1"),
                             HasSubstr("the store does not answer"),
                             HasSubstr("often rank 0, "))));
}

TEST(FailureReportTest, APartNamesTheRanksOfTheWorld) {
  const RankNames part = RankNames(8).Part({3, 5, 6});
  const Reports abort = {kLostHere,
                         RankReport{Cause::kAbort, "disk full", "is in #4"},
                         std::nullopt};
  EXPECT_THAT(Verdict(0, part, abort, true),
              StatusIs(absl::StatusCode::kAborted,
                       "rank 1 (world rank 5) aborted: disk full"));
  const Reports late = {RankReport{Cause::kDeadline, "too late", "is in #4"},
                        kEchoThere, std::nullopt};
  EXPECT_THAT(
      Verdict(1, part, late, true),
      StatusIs(absl::StatusCode::kAborted,
               "rank 0 (world rank 3), which is in #4, gave up: too late; rank "
               "1 (world rank 5) has finished #3; rank 2 (world rank 6) does "
               "not answer: dead, stopped or cut off"));
  const Reports left = {
      kLostHere, RankReport{Cause::kLeft, "", "has finished #3"}, std::nullopt};
  EXPECT_THAT(
      Verdict(0, part, left, false),
      StatusIs(absl::StatusCode::kUnavailable,
               AllOf(HasSubstr("rank 1 (world rank 5) has left the group"),
                     HasSubstr("nothing is known of rank 2 (world rank 6), "),
                     HasSubstr("often world rank 0, "))));
}

}  // namespace
}  // namespace fsdp::comm
