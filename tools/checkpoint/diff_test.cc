#include "tools/checkpoint/diff.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::ContainsRegex;
using testing::FlipByte;
using testing::Floats;
using ::testing::HasSubstr;
using testing::ModelFiles;
using ::testing::Not;
using testing::RankFiles;
using testing::SaveRun;
using testing::SmallModel;
using testing::SmallTensor;
using testing::WriteFolder;

class DiffTest : public ::testing::Test {
 protected:
  // Of the two models, written as "/a" and "/b".
  absl::StatusOr<DiffResult> DiffOf(const std::vector<SmallTensor>& a,
                                    const std::vector<SmallTensor>& b,
                                    const DiffOptions& options = {}) {
    FSDP_RETURN_IF_ERROR(WriteFolder(files_, "/a", ModelFiles(a)));
    FSDP_RETURN_IF_ERROR(WriteFolder(files_, "/b", ModelFiles(b)));
    return DiffFolders(options);
  }

  absl::StatusOr<DiffResult> DiffFolders(const DiffOptions& options = {}) {
    FSDP_ASSIGN_OR_RETURN(const Source a, OpenSource(files_, "/a"));
    FSDP_ASSIGN_OR_RETURN(const Source b, OpenSource(files_, "/b"));
    return Diff(a, b, options);
  }

  SimulatedFileSystem files_;
};

TEST_F(DiffTest, TheSame) {
  ASSERT_OK_AND_ASSIGN(const DiffResult result,
                       DiffOf(SmallModel(NAN), SmallModel(NAN)));
  EXPECT_TRUE(result.same);
  EXPECT_EQ(result.text,
            "A: /a, a Hugging Face model\nB: /b, a Hugging Face model\n"
            "values of 5 tensors compared: 0 differ\n");
}

TEST_F(DiffTest, AnotherFormat) {
  ASSERT_OK(WriteFolder(files_, "/a", ModelFiles(SmallModel(), "model", 40)));
  ASSERT_OK(WriteFolder(files_, "/b", RankFiles(SmallModel(), 3)));
  ASSERT_OK_AND_ASSIGN(const DiffResult result, DiffFolders());
  EXPECT_TRUE(result.same) << result.text;
}

TEST_F(DiffTest, NamesShapesAndDtypes) {
  ASSERT_OK_AND_ASSIGN(
      const DiffResult result,
      DiffOf({Floats("x", {2}, {1, 2}), Floats("y", {2}, {1, 2}),
              Floats("z", {2}, {1, 2})},
             {Floats("x", {1, 2}, {1, 2}),
              {{"y", Dtype::kF16, {2}}, std::string("\x00\x3c\x00\x40", 4)},
              Floats("\x1b", {2}, {1, 2})}));
  EXPECT_FALSE(result.same);
  EXPECT_THAT(result.text, HasSubstr("only in A (1)\n  z  F32[2]\n"));
  EXPECT_THAT(result.text, HasSubstr("only in B (1)\n  \\x1b  F32[2]\n"));
  EXPECT_THAT(result.text, HasSubstr("of another shape or dtype (2)\n"
                                     "  x  F32[2]  F32[1, 2]\n"
                                     "  y  F32[2]  F16[2]\n"));
  EXPECT_THAT(result.text,
              HasSubstr("values of 1 tensor compared: 0 differ\n"));
}

TEST_F(DiffTest, LargestDifferences) {
  DiffOptions options;
  options.top = 2;
  int64_t done = 0;
  options.progress = [&done](int64_t now, int64_t total) {
    done = now;
    EXPECT_EQ(total, 5 * 8);
  };
  ASSERT_OK_AND_ASSIGN(
      const DiffResult result,
      DiffOf({Floats("large", {2}, {100, 200}), Floats("small", {2}, {1, 2}),
              Floats("nan", {2}, {1, 2}), Floats("tiny", {2}, {1, 1e-9F}),
              Floats("equal", {2}, {1, 2})},
             {Floats("large", {2}, {101, 210}), Floats("small", {2}, {1, 2.5}),
              Floats("nan", {2}, {1, NAN}), Floats("tiny", {2}, {1, 2e-9F}),
              Floats("equal", {2}, {1, 2})},
             options));
  EXPECT_FALSE(result.same);
  EXPECT_EQ(done, 40);
  EXPECT_THAT(result.text, HasSubstr("5 tensors compared: 4 differ\n"));
  EXPECT_THAT(result.text,
              ContainsRegex("largest \\|a - b\\|\n"
                            "  nan +0 +1 element +1 not finite\n"
                            "  large +10 +2 elements +largest at 1\n"
                            "largest"));
  EXPECT_THAT(result.text,
              ContainsRegex("max\\(\\|a\\|, \\|b\\|\\)\n"
                            "  nan .*\n"
                            "  tiny +0.5 +1 element +largest at 1\n$"));
  EXPECT_THAT(result.text, Not(HasSubstr("small")));
}

// Bits that are equal as values are differences too.
TEST_F(DiffTest, BitsOfOneDtype) {
  ASSERT_OK_AND_ASSIGN(const DiffResult result,
                       DiffOf({Floats("zero", {1}, {0}),
                               {{"f8", Dtype::kF8E4M3, {3}}, "\x3c\x3c\x3c"}},
                              {Floats("zero", {1}, {-0.0F}),
                               {{"f8", Dtype::kF8E4M3, {3}}, "\x3c\x3d\x3e"}}));
  EXPECT_FALSE(result.same);
  EXPECT_THAT(result.text, ContainsRegex("  zero +0 +1 element\n"));
  EXPECT_THAT(result.text, ContainsRegex("  f8 +\\? +2 elements\n"));
}

TEST_F(DiffTest, DamagedFiles) {
  ASSERT_OK(SaveRun(files_, "/a", 3, SmallModel()));
  ASSERT_OK(SaveRun(files_, "/b", 4, SmallModel()));
  ASSERT_OK_AND_ASSIGN(const DiffResult same, DiffFolders());
  EXPECT_TRUE(same.same) << same.text;
  ASSERT_OK(FlipByte(files_, "/b/step-4/optimizer/exp_avg.safetensors", 4097));
  EXPECT_THAT(DiffFolders(), StatusIs(absl::StatusCode::kDataLoss,
                                      HasSubstr("exp_avg.safetensors")));
}

// More elements than are in memory at a time.
TEST_F(DiffTest, LongTensors) {
  std::vector<float> values((1 << 20) + 7, 1);
  const int64_t size = static_cast<int64_t>(values.size());
  const SmallTensor before = Floats("x", {size}, values);
  values[(1 << 20) + 3] = 3;
  ASSERT_OK_AND_ASSIGN(const DiffResult result,
                       DiffOf({before}, {Floats("x", {size}, values)}));
  EXPECT_THAT(result.text,
              ContainsRegex("  x +2 +1 element +largest at 1048579\n"));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
