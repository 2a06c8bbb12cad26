#include "tools/checkpoint/source.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::Contents;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using testing::FlipByte;
using ::testing::HasSubstr;
using testing::ModelFiles;
using testing::RankFiles;
using testing::ReadAll;
using testing::SaveRun;
using testing::SmallModel;
using ::testing::UnorderedElementsAre;
using testing::WriteFolder;

std::vector<std::string> Names(const Source& source) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : source.catalog.tensors()) {
    names.push_back(tensor.info.name);
  }
  return names;
}

TEST(SourceTest, ACheckpointOfARun) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(SaveRun(files, "/run", 7, SmallModel()));
  ASSERT_OK_AND_ASSIGN(const Source latest, OpenSource(files, "/run"));
  EXPECT_EQ(latest.path, "/run/step-7");
  EXPECT_EQ(latest.format, Format::kCheckpoint);
  EXPECT_THAT(Names(latest),
              UnorderedElementsAre("w", "b", "scalar", "empty", "ids",
                                   "optimizer/exp_avg/w"));
  SourceOptions options;
  options.model_only = true;
  ASSERT_OK_AND_ASSIGN(const Source model,
                       OpenSource(files, "/run/step-3", options));
  EXPECT_EQ(model.manifest->step, 3);
  EXPECT_THAT(Names(model),
              UnorderedElementsAre("w", "b", "scalar", "empty", "ids"));
}

TEST(SourceTest, ChecksumsAreChecked) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(FlipByte(files, "/run/step-3/model.safetensors", 4100));
  EXPECT_THAT(ReadAll(files, "/run"),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("model.safetensors, bytes [0, ")));
  SourceOptions options;
  options.unchecked = true;
  ASSERT_OK(OpenSource(files, "/run", options));
}

TEST(SourceTest, AModelInSeveralFiles) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel(), "model", 40)));
  ASSERT_OK_AND_ASSIGN(const Source source, OpenSource(files, "/hf"));
  EXPECT_EQ(source.format, Format::kHuggingFace);
  EXPECT_GT(source.catalog.files().size(), 1u);
  ASSERT_OK_AND_ASSIGN(const Source index,
                       OpenSource(files, "/hf/model.safetensors.index.json"));
  EXPECT_EQ(Names(index), Names(source));
  ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/hf"));
  for (const testing::SmallTensor& tensor : SmallModel()) {
    EXPECT_EQ(all.at(tensor.info.name), tensor.bytes) << tensor.info.name;
  }
  ASSERT_OK(files.RemoveFile(
      absl::StrCat("/hf/", source.catalog.files().back().name)));
  EXPECT_THAT(OpenSource(files, "/hf"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(source.catalog.files().back().name)));
}

TEST(SourceTest, FilesOfSingleRanks) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/ranks", RankFiles(SmallModel(), 3)));
  ASSERT_OK_AND_ASSIGN(const Source source, OpenSource(files, "/ranks"));
  EXPECT_EQ(source.format, Format::kRankFiles);
  EXPECT_TRUE(HasRankFiles(source));
  ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/ranks"));
  for (const testing::SmallTensor& tensor : SmallModel()) {
    EXPECT_EQ(all.at(tensor.info.name), tensor.bytes) << tensor.info.name;
  }
}

TEST(SourceTest, Refusals) {
  SimulatedFileSystem files;
  ASSERT_OK(files.MakeFolder("/empty"));
  ASSERT_OK(files.MakeFolder("/run"));
  ASSERT_OK(files.MakeFolder("/damaged"));
  ASSERT_OK(ReplaceFile(files, JoinPath("/run", kMarkerName), ""));
  ASSERT_OK(ReplaceFile(files, "/damaged/manifest.json", "{}"));
  ASSERT_OK(ReplaceFile(files, "/notes.txt", "some text"));
  ASSERT_OK(ReplaceFile(files, "/bad.safetensors", "some text"));
  struct Case {
    std::string path;
    absl::StatusCode code;
    std::string text;
  };
  for (const Case& c : std::vector<Case>{
           {"/no/such", absl::StatusCode::kNotFound, "/no/such"},
           {"/empty", absl::StatusCode::kNotFound, "/empty has no model"},
           {"/run", absl::StatusCode::kNotFound, "see checkpoint ls"},
           {"/damaged", absl::StatusCode::kDataLoss, "/damaged/manifest.json"},
           {"/notes.txt", absl::StatusCode::kInvalidArgument,
            "tools/interop/dcp.py"},
           {"/bad.safetensors", absl::StatusCode::kInvalidArgument,
            "/bad.safetensors"}}) {
    EXPECT_THAT(OpenSource(files, c.path), StatusIs(c.code, HasSubstr(c.text)))
        << c.path;
  }
}

// A file that leads elsewhere, by a name in an index.
TEST(SourceTest, HostileNames) {
  SimulatedFileSystem files;
  ASSERT_OK(
      WriteFolder(files, "/hf",
                  {{"model.safetensors.index.json",
                    R"({"weight_map": {"w": "../secret.safetensors"}})"}}));
  EXPECT_THAT(OpenSource(files, "/hf"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("..")));
}

// As the cache of huggingface_hub has them.
TEST(SourceTest, FilesAndFoldersBehindLinks) {
  namespace fs = std::filesystem;
  const std::string root =
      absl::StrCat(::testing::TempDir(), "/source_test.", getpid());
  FileSystem& files = RealFileSystem();
  ASSERT_OK(files.MakeFolder(root));
  ASSERT_OK(WriteFolder(files, root + "/blobs", ModelFiles(SmallModel())));
  ASSERT_OK(files.MakeFolder(root + "/snapshot"));
  fs::create_symlink("../blobs/model.safetensors",
                     root + "/snapshot/model.safetensors");
  fs::create_directory_symlink("snapshot", root + "/latest");
  EXPECT_OK(ReadAll(files, root + "/snapshot"));
  EXPECT_OK(ReadAll(files, root + "/latest"));
  EXPECT_OK(ReadAll(files, root + "/snapshot/model.safetensors"));
  fs::remove_all(root);
}

// A file of which byte i is i % 251.
class TensorStreamTest : public ::testing::Test {
 protected:
  std::string Bytes(int64_t offset, int64_t count) const {
    std::string bytes;
    for (int64_t i = offset; i < offset + count; ++i) {
      bytes.push_back(static_cast<char>(i % 251));
    }
    return bytes;
  }

  void SetUp() override {
    ASSERT_OK(ReplaceFile(files_, "/f", Bytes(0, kBytes)));
    RangeReaderOptions options;
    options.chunk_bytes = kBlockBytes;
    options.chunks = 2;
    ASSERT_OK_AND_ASSIGN(reader_,
                         RangeReader::Create(files_, {{"/f"}}, options));
  }

  absl::StatusOr<std::string> Stream(const StoredTensor& tensor, int64_t begin,
                                     int64_t end) {
    std::string bytes;
    const auto item =
        static_cast<size_t>(std::max<int64_t>(1, ItemBytes(tensor.info.dtype)));
    FSDP_RETURN_IF_ERROR(StreamElements(
        *reader_, tensor, begin, end, [&](absl::Span<const char> part) {
          EXPECT_EQ(part.size() % item, 0u);
          bytes.append(part.data(), part.size());
          return absl::OkStatus();
        }));
    return bytes;
  }

  static constexpr int64_t kBytes = 3'000'003;
  SimulatedFileSystem files_;
  std::unique_ptr<RangeReader> reader_;
};

StoredTensor Whole(Dtype dtype, std::vector<int64_t> shape, int64_t offset) {
  StoredTensor tensor;
  tensor.info = {"t", dtype, shape};
  StoredBox box;
  box.offsets.assign(shape.size(), 0);
  box.sizes = std::move(shape);
  box.offset = offset;
  tensor.boxes.push_back(std::move(box));
  return tensor;
}

// Offset 3: every chunk of the reader cuts an element.
TEST_F(TensorStreamTest, GivesWholeElementsOnly) {
  const StoredTensor tensor = Whole(Dtype::kF64, {375'000}, 3);
  ASSERT_OK_AND_ASSIGN(const std::string all, Stream(tensor, 0, 375'000));
  EXPECT_EQ(all, Bytes(3, 3'000'000));
  ASSERT_OK_AND_ASSIGN(const std::string some, Stream(tensor, 7, 8));
  EXPECT_EQ(some, Bytes(3 + 7 * 8, 8));
  ASSERT_OK_AND_ASSIGN(const std::string none, Stream(tensor, 7, 7));
  EXPECT_EQ(none, "");
}

TEST_F(TensorStreamTest, ScalarsAndEmptyOnes) {
  ASSERT_OK_AND_ASSIGN(const std::string scalar,
                       Stream(Whole(Dtype::kF32, {}, 9), 0, 1));
  EXPECT_EQ(scalar, Bytes(9, 4));
  StoredTensor empty;
  empty.info = {"t", Dtype::kF32, {0, 3}};
  ASSERT_OK_AND_ASSIGN(const std::string none, Stream(empty, 0, 0));
  EXPECT_EQ(none, "");
}

TEST_F(TensorStreamTest, PiecesOfColumns) {
  StoredTensor tensor;
  tensor.info = {"t", Dtype::kI16, {2, 3}};
  StoredBox left;
  left.offsets = {0, 0};
  left.sizes = {2, 1};
  left.offset = 100;
  StoredBox right;
  right.offsets = {0, 1};
  right.sizes = {2, 2};
  right.offset = 10;
  tensor.boxes = {right, left};
  ASSERT_OK_AND_ASSIGN(const std::string all, Stream(tensor, 0, 6));
  EXPECT_EQ(all, Bytes(100, 2) + Bytes(10, 4) + Bytes(102, 2) + Bytes(14, 4));
}

TEST_F(TensorStreamTest, ElementsThatDoNotFillBytes) {
  const StoredTensor tensor = Whole(Dtype::kF4, {6}, 5);
  ASSERT_OK_AND_ASSIGN(const std::string all, Stream(tensor, 0, 6));
  EXPECT_EQ(all, Bytes(5, 3));
  EXPECT_THAT(Stream(tensor, 0, 2),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("cannot be read in ranges")));
}

TEST_F(TensorStreamTest, FilesThatAreTooShort) {
  EXPECT_THAT(Stream(Whole(Dtype::kF64, {375'001}, 3), 0, 375'001),
              StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("/f")));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
