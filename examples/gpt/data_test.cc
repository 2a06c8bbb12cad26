#include "examples/gpt/data.h"

#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace gpt {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(DefaultTextTest, IsTheFolderOfLibTorchsHeaders) {
  ASSERT_OK_AND_ASSIGN(const std::string path, DefaultText(""));
  EXPECT_TRUE(std::filesystem::exists(path + "/ATen/ATen.h"));
}

TEST(ReadTextTest, TakesAllTextBelowAFolderInTheOrderOfPaths) {
  const std::string folder =
      absl::StrCat(::testing::TempDir(), "/read_text_test.", getpid());
  std::filesystem::create_directories(folder + "/a");
  std::ofstream(folder + "/b") << "second";
  std::ofstream(folder + "/a/z") << "first ";
  std::ofstream(folder + "/binary") << std::string("no\0text", 7);
  ASSERT_OK_AND_ASSIGN(const torch::Tensor text, ReadText(folder, /*seq=*/11));
  EXPECT_EQ(std::string(text.const_data_ptr<uint8_t>(),
                        text.const_data_ptr<uint8_t>() + text.numel()),
            "first second");
  EXPECT_THAT(ReadText(folder, /*seq=*/12),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("has 12 bytes of text: --seq=12 needs more")));
  EXPECT_THAT(ReadText(folder + "/c", /*seq=*/1),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(folder + "/c")));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace gpt
