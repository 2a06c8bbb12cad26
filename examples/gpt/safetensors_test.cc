#include "examples/gpt/safetensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

class SafetensorsTest : public ::testing::Test {
 protected:
  SafetensorsTest() { std::filesystem::create_directory(directory_); }
  ~SafetensorsTest() override { std::filesystem::remove_all(directory_); }

  absl::Status WriteTwo() {
    FSDP_ASSIGN_OR_RETURN(
        std::unique_ptr<SafetensorsWriter> writer,
        SafetensorsWriter::Create(
            path_, {{"weight", {2, 3}, at::kFloat}, {"step", {}, at::kLong}}));
    FSDP_RETURN_IF_ERROR(writer->Write("step", at::arange(7, 8)[0]));
    // A transposed tensor is written in the order of its shape.
    FSDP_RETURN_IF_ERROR(
        writer->Write("weight", at::arange(6, at::kFloat).view({3, 2}).t()));
    return writer->Finish();
  }
  int FilesInDirectory() const {
    using std::filesystem::directory_iterator;
    return std::distance(directory_iterator(directory_), directory_iterator());
  }

  const std::string directory_ =
      absl::StrCat(::testing::TempDir(), "/safetensors_test.", getpid());
  const std::string path_ = absl::StrCat(directory_, "/model.safetensors");
};

TEST_F(SafetensorsTest, ReadsBackWhatItWrites) {
  ASSERT_OK(WriteTwo());
  EXPECT_EQ(FilesInDirectory(), 1);
  ASSERT_OK_AND_ASSIGN(SafetensorsReader reader,
                       SafetensorsReader::Open(path_));
  at::Tensor weight = at::zeros({2, 3});
  at::Tensor step = at::zeros({}, at::kLong);
  ASSERT_OK(reader.Read("weight", weight));
  ASSERT_OK(reader.Read("step", step));
  EXPECT_TRUE(weight.equal(at::arange(6, at::kFloat).view({3, 2}).t()));
  EXPECT_EQ(step.item<int64_t>(), 7);
  EXPECT_OK(reader.ExpectOnly({"weight", "step", "more"}));
}

TEST_F(SafetensorsTest, NamesWhatDoesNotMatchTheModel) {
  ASSERT_OK(WriteTwo());
  ASSERT_OK_AND_ASSIGN(SafetensorsReader reader,
                       SafetensorsReader::Open(path_));
  EXPECT_THAT(reader.Read("bias", at::zeros({2})),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr(path_), HasSubstr("\"bias\""))));
  EXPECT_THAT(
      reader.Read("weight", at::zeros({3, 2})),
      StatusIs(kInvalid, HasSubstr("\"weight\" is F32[2, 3] in the file, but "
                                   "F32[3, 2] in the model")));
  EXPECT_THAT(reader.Read("weight", at::zeros({2, 3}, at::kDouble)),
              StatusIs(kInvalid, HasSubstr("F64[2, 3] in the model")));
  EXPECT_THAT(reader.ExpectOnly({"weight"}),
              StatusIs(kInvalid, HasSubstr("first is \"step\"")));
}

TEST_F(SafetensorsTest, RefusesFilesThatAreNotThereOrDamaged) {
  EXPECT_THAT(SafetensorsReader::Open(path_).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(path_)));
  EXPECT_THAT(SafetensorsReader::Open(directory_).status(),
              StatusIs(kInvalid, HasSubstr("no regular file")));
  std::ofstream(path_) << "short";
  EXPECT_THAT(SafetensorsReader::Open(path_).status(),
              StatusIs(kInvalid, HasSubstr("5 bytes cannot hold")));
  ASSERT_OK(WriteTwo());
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 1);
  EXPECT_THAT(
      SafetensorsReader::Open(path_).status(),
      StatusIs(kInvalid, AllOf(HasSubstr(path_), HasSubstr("truncated"))));
}

TEST_F(SafetensorsTest, AFifoIsRefusedAtOnce) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(SafetensorsReader::Open(path_),
              StatusIs(kInvalid, HasSubstr("no regular file")));
}

TEST_F(SafetensorsTest, NoCutOfAFileCrashesOrPasses) {
  ASSERT_OK(WriteTwo());
  std::stringstream whole;
  whole << std::ifstream(path_, std::ios::binary).rdbuf();
  for (size_t size = 0; size < whole.str().size(); ++size) {
    std::ofstream(path_, std::ios::binary) << whole.str().substr(0, size);
    EXPECT_THAT(SafetensorsReader::Open(path_).status(),
                StatusIs(kInvalid, HasSubstr(path_)));
  }
}

TEST_F(SafetensorsTest, AWriterThatDoesNotFinishLeavesTheOldFile) {
  ASSERT_OK(WriteTwo());
  const auto old_size = std::filesystem::file_size(path_);
  {
    ASSERT_OK_AND_ASSIGN(
        std::unique_ptr<SafetensorsWriter> writer,
        SafetensorsWriter::Create(path_, {{"a", {9}, at::kFloat}}));
    EXPECT_THAT(writer->Finish(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("\"a\" is one")));
  }
  EXPECT_EQ(std::filesystem::file_size(path_), old_size);
  EXPECT_EQ(FilesInDirectory(), 1);
}

TEST_F(SafetensorsTest, AWriterRefusesWhatWasNotAnnounced) {
  ASSERT_OK_AND_ASSIGN(
      std::unique_ptr<SafetensorsWriter> writer,
      SafetensorsWriter::Create(path_, {{"a", {1}, at::kFloat}}));
  EXPECT_THAT(writer->Write("b", at::zeros({1})),
              StatusIs(kInvalid, HasSubstr("\"b\" was not announced")));
  EXPECT_THAT(writer->Write("a", at::zeros({2})),
              StatusIs(kInvalid, HasSubstr("F32[1]")));
  EXPECT_OK(writer->Write("a", at::zeros({1})));
  EXPECT_THAT(writer->Write("a", at::zeros({1})),
              StatusIs(kInvalid, HasSubstr("written twice")));
  EXPECT_THAT(SafetensorsWriter::Create(
                  path_, {{"a", {1}, at::kFloat}, {"a", {1}, at::kFloat}})
                  .status(),
              StatusIs(kInvalid, HasSubstr("announced twice")));
  EXPECT_THAT(
      SafetensorsWriter::Create(absl::StrCat(directory_, "/no/file"), {})
          .status(),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/file")));
}

}  // namespace
}  // namespace gpt
