#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/source.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

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
