#include "checkpoint/testing/dcp_run.h"

#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

// What check_with_python.py recorded: what tools/interop/dcp.py made of FSDP2's
// files after five steps on two ranks, and FSDP2's losses from there.
TEST(DcpRunTest, GoesOnWhereFsdp2Was) {
  for (const char* const style : {"plain", "torchtitan"}) {
    const std::string folder =
        absl::StrCat("checkpoint/testing/data/dcp_adamw_", style);
    SCOPED_TRACE(folder);
    DcpRun run;
    run.folder = absl::StrCat(::testing::TempDir(), "/", style);
    run.optimizer = "AdamW";
    std::filesystem::copy(JoinPath(folder, "model"), run.folder,
                          std::filesystem::copy_options::recursive);
    ASSERT_OK_AND_ASSIGN(const std::vector<double> losses, LoadAndGoOn(run));
    ASSERT_OK_AND_ASSIGN(
        const std::string text,
        ReadFile(RealFileSystem(), JoinPath(folder, "lines.txt"), 1000));
    const std::vector<std::string> lines =
        absl::StrSplit(text, '\n', absl::SkipEmpty());
    ASSERT_EQ(lines.size(), losses.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      double expected = 0;
      ASSERT_TRUE(absl::SimpleAtod(lines[i], &expected)) << lines[i];
      EXPECT_NEAR(losses[i], expected, 1e-6) << i;
    }
  }
}

TEST(DcpRunTest, GoesOnWhereItWasItself) {
  DcpRun run;
  run.folder = absl::StrCat(::testing::TempDir(), "/dcp_run");
  run.optimizer = "AdamW";
  ASSERT_OK_AND_ASSIGN(const std::vector<double> losses, SaveAndGoOn(run));
  ASSERT_OK_AND_ASSIGN(const std::vector<double> again, LoadAndGoOn(run));
  EXPECT_EQ(losses, again);
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
