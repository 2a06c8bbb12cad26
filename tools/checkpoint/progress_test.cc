#include <sstream>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

TEST(ProgressTest, WritesOneLineNowAndThen) {
  std::ostringstream out;
  absl::Time now = absl::UnixEpoch();
  {
    Progress progress(out, "verify", [&now] { return now; });
    progress.Update(0, 4'000'000'000);
    now += absl::Milliseconds(199);
    progress.Update(1'000'000, 4'000'000'000);  // too soon
    now += absl::Milliseconds(801);
    progress.Update(1'000'000'000, 4'000'000'000);
    now += absl::Seconds(3);
    progress.Update(4'000'000'000, 4'000'000'000);
  }
  EXPECT_EQ(out.str(),
            "\rverify: 0 B of 4.00 GB"
            "\rverify: 1.00 GB of 4.00 GB, 1.00 GB/s, 3 s left"
            "\rverify: 4.00 GB of 4.00 GB, 1.00 GB/s, 0 s left\n");
}

TEST(ProgressTest, NothingToDoIsNoLine) {
  std::ostringstream out;
  {
    Progress progress(out, "verify", [] { return absl::UnixEpoch(); });
  }
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
