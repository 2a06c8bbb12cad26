#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::testing::Not;

class NewestStepTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }

  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(folder_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/newest");
};

TEST_F(NewestStepTest, IsNoneWhereNothingWasSaved) {
  for (const std::string& folder : {folder_, folder_ + "/missing"}) {
    ASSERT_OK_AND_ASSIGN(const std::optional<int64_t> step, NewestStep(folder));
    EXPECT_EQ(step, std::nullopt);
  }
}

TEST_F(NewestStepTest, IsTheHighestThatIsWhole) {
  Write("step-9/manifest.json", "");
  Write("step-10/manifest.json", "");
  Write("step-11/model.safetensors", "");
  ASSERT_OK_AND_ASSIGN(const std::optional<int64_t> step, NewestStep(folder_));
  EXPECT_EQ(step, 10);
}

TEST_F(NewestStepTest, OrThatFromWhichARunWentOn) {
  Write("step-9/manifest.json", "");
  Write("step-10/manifest.json", "");
  Write("latest", "step-9\n");
  ASSERT_OK_AND_ASSIGN(const std::optional<int64_t> step, NewestStep(folder_));
  EXPECT_EQ(step, 9);
}

TEST_F(NewestStepTest, SaysWhatCannotBeRead) {
  Write("file", "");
  EXPECT_THAT(NewestStep(folder_ + "/file").status(),
              Not(::fsdp::testing::IsOk()));
}

}  // namespace
}  // namespace fsdp::checkpoint
