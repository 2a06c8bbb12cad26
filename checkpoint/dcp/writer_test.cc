#include "checkpoint/dcp/writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/dcp/chunk_reader.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_reader.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/crc32.h"
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

DcpWriteTensor Tensor(DcpPath path, Dtype dtype, std::vector<int64_t> shape) {
  const std::string name = DcpName(path);
  return {{name, dtype, std::move(shape)}, std::move(path)};
}

const std::vector<DcpWriteTensor>& Tensors() {
  static const auto* const tensors = new std::vector<DcpWriteTensor>{
      Tensor({"model", "w"}, Dtype::kF32, {5, 7, 3}),
      Tensor({"model", "bf16"}, Dtype::kBF16, {11}),
      Tensor({"model", "empty"}, Dtype::kI64, {0, 3}),
      Tensor({"model", "f8"}, Dtype::kF8E4M3, {3, 5}),
      Tensor({"optim", "state", "w", "step"}, Dtype::kF32, {}),
      Tensor({"optim", "state", "w", "exp_avg"}, Dtype::kF32, {5, 7, 3}),
  };
  return *tensors;
}

std::vector<DcpWriteValue> Values() {
  return {
      {{"optim", "param_groups", int64_t{0}, "lr"}, Value{0.125}},
      {{"optim", "param_groups", int64_t{0}, "params"},
       Value{Value::List{{Value{std::string("w")}}}}},
      {{"step"}, Value{int64_t{7}}},
  };
}

// Byte i of tensor t.
char Byte(int tensor, int64_t i) {
  return static_cast<char>((int64_t{37} * tensor + i * 11) % 64);
}

struct Written {
  std::string metadata;
  std::vector<DcpRankFile> layouts;
  std::vector<std::string> files;
};

std::string Fill(const DcpRankFile& layout) {
  std::string file(static_cast<size_t>(layout.bytes), '\0');
  for (const DcpFileValue& value : layout.values) {
    file.replace(static_cast<size_t>(value.offset), value.bytes.size(),
                 value.bytes);
  }
  for (const DcpFileChunk& chunk : layout.chunks) {
    const DcpWriteTensor& tensor = Tensors()[static_cast<size_t>(chunk.tensor)];
    std::string bytes;
    for (int64_t i = 0; i < chunk.bytes; ++i) {
      bytes.push_back(
          Byte(chunk.tensor, chunk.first * ItemBytes(tensor.info.dtype) + i));
    }
    file.replace(static_cast<size_t>(chunk.payload), bytes.size(), bytes);
    for (const ArchivePiece& piece :
         FrameDcpChunk(tensor, chunk, Crc32(bytes))) {
      file.replace(static_cast<size_t>(piece.offset), piece.bytes.size(),
                   piece.bytes);
    }
  }
  return file;
}

// Each rank has an equal part of each tensor, wherever that cuts it.
absl::StatusOr<Written> Write(int ranks) {
  Written written;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<DcpRange> ranges;
    for (int i = 0; i < static_cast<int>(Tensors().size()); ++i) {
      const auto numel = NumelOf(Tensors()[static_cast<size_t>(i)].info);
      const int64_t begin = *numel * rank / ranks;
      const int64_t end = *numel * (rank + 1) / ranks;
      if (begin < end || (*numel == 0 && rank == 0)) {
        ranges.push_back({i, begin, end});
      }
    }
    absl::StatusOr<DcpRankFile> layout =
        LayOutDcpFile(rank, Tensors(), ranges,
                      rank == 0 ? Values() : std::vector<DcpWriteValue>(),
                      /*max_chunk_bytes=*/100);
    if (!layout.ok()) return layout.status();
    written.files.push_back(Fill(*layout));
    written.layouts.push_back(*std::move(layout));
  }
  absl::StatusOr<std::string> metadata =
      DcpMetadataBytes(Tensors(), Values(), written.layouts);
  if (!metadata.ok()) return metadata.status();
  written.metadata = *std::move(metadata);
  return written;
}

TEST(DcpWriterTest, WhatIsWrittenIsRead) {
  for (const int ranks : {1, 2, 3, 8}) {
    ASSERT_OK_AND_ASSIGN(const Written written, Write(ranks));
    ASSERT_OK_AND_ASSIGN(const DcpMetadata metadata,
                         ReadDcpMetadata(written.metadata));
    ASSERT_EQ(metadata.tensors.size(), Tensors().size());
    std::map<std::string, const std::string*> files;
    for (size_t i = 0; i < written.files.size(); ++i) {
      files[written.layouts[i].name] = &written.files[i];
    }
    for (size_t i = 0; i < Tensors().size(); ++i) {
      const DcpTensor& tensor = metadata.tensors[i];
      EXPECT_EQ(tensor.info, Tensors()[i].info);
      for (const DcpChunk& chunk : tensor.chunks) {
        EXPECT_EQ(chunk.place.offset % 4096, 0);
        const std::string& file =
            *files.at(metadata.files[static_cast<size_t>(chunk.place.file)]);
        ASSERT_OK_AND_ASSIGN(
            const int64_t at,
            FindChunkBytes(tensor, chunk, testing::ReadFrom(file)));
        EXPECT_EQ(at % 64, 0);
        int64_t first = 0;
        for (size_t d = 0; d < chunk.box.offsets.size(); ++d) {
          first = first * tensor.info.shape[d] + chunk.box.offsets[d];
        }
        const int64_t item = ItemBytes(tensor.info.dtype);
        EXPECT_LE(chunk.box.Numel() * item, 100);
        for (int64_t j = 0; j < chunk.box.Numel() * item; ++j) {
          ASSERT_EQ(file[static_cast<size_t>(at + j)],
                    Byte(static_cast<int>(i), first * item + j));
        }
      }
    }
    EXPECT_EQ(metadata.values.size(), 3u);
    EXPECT_EQ(metadata.paths.size(), 9u);
    ASSERT_OK_AND_ASSIGN(const Value lr,
                         ReadDcpValue(metadata.values[0].second,
                                      testing::ReadFrom(written.files[0])));
    EXPECT_EQ(std::get<double>(lr.is), 0.125);
  }
}

TEST(DcpWriterTest, WhatIsInFrontOfElementsIsThereBeforeThem) {
  ASSERT_OK_AND_ASSIGN(const DcpRankFile file,
                       LayOutDcpFile(0, Tensors(), {{0, 0, 105}}, {}));
  const DcpFileChunk& chunk = file.chunks[0];
  const std::vector<ArchivePiece> a = FrameDcpChunk(Tensors()[0], chunk, 1);
  const std::vector<ArchivePiece> b = FrameDcpChunk(Tensors()[0], chunk, 2);
  ASSERT_EQ(a.size(), 2u);
  EXPECT_EQ(a[0].offset + static_cast<int64_t>(a[0].bytes.size()),
            chunk.payload);
  EXPECT_EQ(a[0].bytes, b[0].bytes);
  EXPECT_NE(a[1].bytes, b[1].bytes);
}

// The bytes that torch 2.11 has read (testing/read_with_torch.py).
TEST(DcpWriterTest, TheBytesStayAsTheyAre) {
  ASSERT_OK_AND_ASSIGN(const Written written, Write(3));
  // Kept where a person wants to read it.
  if (const char* const folder = std::getenv("FSDP_DCP_SAMPLE")) {
    for (size_t i = 0; i < written.files.size(); ++i) {
      std::ofstream(absl::StrCat(folder, "/", written.layouts[i].name),
                    std::ios::binary)
          << written.files[i];
    }
    std::ofstream(absl::StrCat(folder, "/.metadata"), std::ios::binary)
        << written.metadata;
  }
  uint32_t crc = Crc32(written.metadata);
  for (const std::string& file : written.files) crc = Crc32(file, crc);
  EXPECT_EQ(crc, 1255044992u);
}

TEST(DcpWriterTest, WhatCannotBeWritten) {
  const std::vector<DcpWriteTensor>& tensors = Tensors();
  EXPECT_THAT(LayOutDcpFile(0, tensors, {{1, 3, 12}}, {}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tensor \"model.bf16\" has no elements [3, "
                                 "12)")));
  ASSERT_OK_AND_ASSIGN(const DcpRankFile half,
                       LayOutDcpFile(0, tensors, {{1, 0, 5}}, {}));
  EXPECT_THAT(DcpMetadataBytes({tensors[1]}, {}, {}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tensor \"model.bf16\": element [0] is in "
                                 "none")));
  const std::vector<DcpWriteTensor> f4 = {Tensor({"packed"}, Dtype::kF4, {2})};
  EXPECT_THAT(LayOutDcpFile(0, f4, {{0, 0, 2}}, {}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no such dtype as F4")));
  ArchiveTensor tensor;
  EXPECT_THAT(LayOutDcpFile(0, {}, {}, {{{"t"}, Value{tensor}}}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("\"t\" has tensors: give them as tensors")));
}

// Of a model that nobody holds.
TEST(DcpWriterTest, ChunksOfLargeTensorsAreBounded) {
  const std::vector<DcpWriteTensor> tensors = {
      Tensor({"w"}, Dtype::kF32, {1 << 20, 4096})};
  ASSERT_OK_AND_ASSIGN(
      const DcpRankFile file,
      LayOutDcpFile(0, tensors, {{0, 1, (int64_t{1} << 32) - 1}}, {}));
  int64_t bytes = 0;
  for (const DcpFileChunk& chunk : file.chunks) {
    EXPECT_LE(chunk.bytes, int64_t{256} << 20);
    bytes += chunk.bytes;
  }
  EXPECT_EQ(bytes, 4 * ((int64_t{1} << 32) - 2));
  EXPECT_EQ(file.chunks.size(), 66u);
}

}  // namespace
}  // namespace fsdp::checkpoint
