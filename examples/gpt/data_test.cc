#include "examples/gpt/data.h"

#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

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

// Returns bytes that say where they are.
torch::Tensor Places() { return torch::arange(256).to(torch::kByte); }

TEST(BatchOfTest, TargetsFollowTheirInputs) {
  const Batch batch = BatchOf(Places(), /*step=*/3, {1, 2, 5, 7});
  EXPECT_EQ(batch.inputs.sizes(), torch::IntArrayRef({5, 7}));
  EXPECT_TRUE(batch.targets.equal(batch.inputs + 1));
  EXPECT_TRUE(batch.inputs.slice(1, 1).equal(batch.targets.slice(1, 0, 6)));
}

TEST(BatchOfTest, RanksHaveTheRowsOfOneRankBetweenThem) {
  const torch::Tensor all = BatchOf(Places(), 3, {0, 1, 6, 7}).inputs;
  const torch::Tensor first = BatchOf(Places(), 3, {0, 2, 3, 7}).inputs;
  const torch::Tensor second = BatchOf(Places(), 3, {1, 2, 3, 7}).inputs;
  EXPECT_TRUE(torch::cat({first, second}).equal(all));
  EXPECT_FALSE(first.equal(second));
  EXPECT_FALSE(BatchOf(Places(), 4, {0, 1, 6, 7}).inputs.equal(all));
}

}  // namespace
}  // namespace gpt
