#include "checkpoint/save/rank_report.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/checksums.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

RankReport Full() {
  RankReport report;
  report.status = absl::DataLossError("the disk");
  report.plan = std::string("a\nb\0c", 5);
  report.own_bytes = {7, 0, int64_t{1} << 40};
  report.whole_values = 0xfedcba98;
  report.pieces = {{0, 4096, 17, 1},
                   {3, int64_t{5} << 33, 1 << 20, 0xffffffff}};
  return report;
}

TEST(RankReportTest, ComesBack) {
  for (const RankReport& report : {Full(), RankReport()}) {
    const absl::StatusOr<RankReport> back = Decode(Encode(report));
    ASSERT_OK(back.status());
    EXPECT_EQ(back->status, report.status);
    EXPECT_EQ(back->plan, report.plan);
    EXPECT_EQ(back->own_bytes, report.own_bytes);
    EXPECT_EQ(back->whole_values, report.whole_values);
    EXPECT_EQ(back->pieces, report.pieces);
  }
}

TEST(RankReportTest, WhatIsCutOffOrTooLongIsNone) {
  const std::string bytes = Encode(Full());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(Decode(bytes.substr(0, size)).status().code(),
              absl::StatusCode::kInternal)
        << size;
  }
  EXPECT_FALSE(Decode(bytes + "x").ok());
  EXPECT_FALSE(Decode(std::string(64, '\xff')).ok());
}

TEST(RankReportTest, TheLowestErrorCounts) {
  std::vector<RankReport> reports(4);
  EXPECT_OK(CheckReports(reports));
  reports[3].status = absl::AbortedError("late");
  reports[2].status = absl::ResourceExhaustedError("full");
  EXPECT_THAT(CheckReports(reports),
              StatusIs(absl::StatusCode::kResourceExhausted, "rank 2: full"));
  EXPECT_THAT(CheckReports({Full()}),
              StatusIs(absl::StatusCode::kDataLoss, "the disk"));
}

TEST(RankReportTest, PlansHaveToBeEqual) {
  std::vector<RankReport> reports(3);
  for (RankReport& report : reports) report.plan = "w F32[2]\nb F32[3]";
  reports[2].plan = "w F32[2]\nb BF16[3]";
  EXPECT_THAT(CheckReports(reports),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"b F32[3]\""),
                             HasSubstr("\"b BF16[3]\" (rank 2)"))));
  reports[2].plan = "w F32[2]";
  EXPECT_THAT(CheckReports(reports),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rank 0 has 2 files")));
}

}  // namespace
}  // namespace fsdp::checkpoint
