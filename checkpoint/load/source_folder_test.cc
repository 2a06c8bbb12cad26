#include "checkpoint/load/source_folder.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::ForwardingFileSystem;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kFiles = 50;

// A model of many files with a tensor in each; every tenth has a header that is
// longer than what is read at first.
class SourceFolderTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::vector<std::string> weights;
    for (int i = 0; i < kFiles; ++i) {
      const std::string tensor = absl::StrCat("tensor", i);
      Write(absl::StrCat("part-", i, ".safetensors"), File(i, tensor));
      weights.push_back(
          absl::StrCat("\"", tensor, "\": \"part-", i, ".safetensors\""));
    }
    Write("model.safetensors.index.json",
          absl::StrCat(R"({"weight_map": {)", absl::StrJoin(weights, ", "),
                       "}}"));
  }

  static std::string File(int i, const std::string& tensor) {
    SafetensorsMetadata metadata;
    if (i % 10 == 0) metadata["note"] = std::string(100'000, 'n');
    const TensorInfo info{tensor, Dtype::kF32, {1}};
    return *FormatSafetensorsHeader(*PlaceTensors({info}), metadata) + "abcd";
  }

  void Write(const std::string& name, const std::string& contents) {
    ASSERT_OK(ReplaceFile(disk_, JoinPath("/", name), contents));
    std::vector<FilePiece> pieces;
    AppendPieces(0, 0, contents, pieces);
    sums_[name] =
        CombinePieces(pieces, {{name, static_cast<int64_t>(contents.size())}})
            ->front();
  }

  SourceFolder Folder() {
    return SourceFolder(files_, "/",
                        GetParam() ? std::make_optional(sums_) : std::nullopt);
  }

  SimulatedFileSystem disk_;
  ForwardingFileSystem files_{disk_};
  SumsByName sums_;
};

INSTANTIATE_TEST_SUITE_P(Checked, SourceFolderTest, ::testing::Bool());

TEST_P(SourceFolderTest, EachHeaderIsReadWithOneOpen) {
  const absl::StatusOr<Catalog> catalog = Folder().ReadStem("model");
  ASSERT_OK(catalog);
  EXPECT_EQ(catalog->tensors().size(), size_t{kFiles});
  for (int i = 0; i < kFiles; ++i) {
    EXPECT_NE(catalog->Find(absl::StrCat("tensor", i)), nullptr) << i;
  }
  EXPECT_EQ(files_.opened(), kFiles + 1);
  EXPECT_LE(files_.most_open(), RangeReader::kMostOpenFiles + 4);
}

TEST_P(SourceFolderTest, WhatIsMissingIsListedAllAtOnce) {
  for (const int i : {3, 40}) {
    const std::string name = absl::StrCat("part-", i, ".safetensors");
    ASSERT_OK(disk_.RemoveFile(JoinPath("/", name)));
    sums_.erase(name);
  }
  EXPECT_THAT(Folder().ReadStem("model"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("model.safetensors.index.json"),
                             HasSubstr("part-3.safetensors"),
                             HasSubstr("part-40.safetensors"))));
}

TEST_P(SourceFolderTest, ADamagedHeaderIsNamed) {
  Write("part-30.safetensors", "short");
  EXPECT_THAT(Folder().ReadStem("model"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("/part-30.safetensors: ")));
  Write("part-30.safetensors", std::string(100, '\xff'));
  EXPECT_THAT(Folder().ReadStem("model"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("/part-30.safetensors: ")));
}

TEST_P(SourceFolderTest, ATextThatIsTooLargeIsNotRead) {
  EXPECT_THAT(Folder().ReadText("part-0.safetensors", 100),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("where 100 are the most")));
  EXPECT_EQ(files_.read_bytes(), 0);
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
