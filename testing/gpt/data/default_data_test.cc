#include "testing/gpt/data/default_data.h"

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

TEST(DefaultDataTest, IsTheFolderOfLibTorchsHeaders) {
  ASSERT_OK_AND_ASSIGN(std::string path, DefaultDataPath(""));
  EXPECT_TRUE(std::filesystem::exists(path + "/ATen/ATen.h"));
}

}  // namespace
}  // namespace gpt
