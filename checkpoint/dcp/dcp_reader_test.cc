// Reads what torch.distributed.checkpoint.save() wrote.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/dcp/chunk_reader.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_reader.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string File(absl::string_view folder, absl::string_view name) {
  return testing::ReadWholeFile(
      absl::StrCat("checkpoint/dcp/testing/data/", folder, "/", name));
}

std::map<std::string, DcpTensor> ByName(const DcpMetadata& metadata) {
  std::map<std::string, DcpTensor> tensors;
  for (const DcpTensor& tensor : metadata.tensors) {
    tensors[tensor.info.name] = tensor;
  }
  return tensors;
}

// The first element of a chunk.
float First(absl::string_view folder, const DcpMetadata& metadata,
            const DcpTensor& tensor, size_t chunk) {
  const DcpChunk& stored = tensor.chunks[chunk];
  const std::string file =
      File(folder, metadata.files[static_cast<size_t>(stored.place.file)]);
  const absl::StatusOr<int64_t> at =
      FindChunkBytes(tensor, stored, testing::ReadFrom(file));
  EXPECT_OK(at);
  float value = -1;
  if (at.ok()) {
    file.copy(reinterpret_cast<char*>(&value), sizeof(value),
              static_cast<size_t>(*at));
  }
  return value;
}

TEST(DcpReaderTest, OfOneProcess) {
  ASSERT_OK_AND_ASSIGN(const DcpMetadata metadata,
                       ReadDcpMetadata(File("plain", "metadata")));
  EXPECT_EQ(metadata.version, "1.0.0");
  EXPECT_THAT(metadata.files, ElementsAre("__0_0.distcp"));
  const std::map<std::string, DcpTensor> tensors = ByName(metadata);
  EXPECT_EQ(tensors.size(), 8u);
  EXPECT_THAT(tensors.at("model.w").info.shape, ElementsAre(3, 5));
  EXPECT_EQ(tensors.at("model.bf16").info.dtype, Dtype::kBF16);
  EXPECT_EQ(tensors.at("model.i64").info.dtype, Dtype::kI64);
  EXPECT_EQ(tensors.at("model.bool").info.dtype, Dtype::kBool);
  EXPECT_TRUE(tensors.at("model.empty").chunks.empty());
  EXPECT_EQ(First("plain", metadata, tensors.at("model.scalar"), 0), 2.5f);
  EXPECT_EQ(First("plain", metadata, tensors.at("optim.state.w.exp_avg"), 0),
            100);
  EXPECT_EQ(First("plain", metadata, tensors.at("optim.state.w.step"), 0), 7);
}

TEST(DcpReaderTest, ValuesAndPaths) {
  ASSERT_OK_AND_ASSIGN(const DcpMetadata metadata,
                       ReadDcpMetadata(File("plain", "metadata")));
  const std::string file = File("plain", "__0_0.distcp");
  std::map<std::string, Value> values;
  for (const auto& [name, place] : metadata.values) {
    ASSERT_OK_AND_ASSIGN(values[name],
                         ReadDcpValue(place, testing::ReadFrom(file)));
  }
  EXPECT_EQ(values.size(), 3u);
  EXPECT_EQ(std::get<double>(values.at("optim.param_groups.0.lr").is), 0.125);
  const auto& params =
      std::get<Value::List>(values.at("optim.param_groups.0.params").is).items;
  ASSERT_EQ(params.size(), 1u);
  EXPECT_EQ(std::get<std::string>(params[0].is), "w");
  std::map<std::string, DcpPath> paths(metadata.paths.begin(),
                                       metadata.paths.end());
  const DcpPath lr = {"optim", "param_groups", int64_t{0}, "lr"};
  EXPECT_EQ(paths.at("optim.param_groups.0.lr"), lr);
  EXPECT_EQ(DcpName(lr), "optim.param_groups.0.lr");
}

TEST(DcpReaderTest, OfTwoRanks) {
  ASSERT_OK_AND_ASSIGN(const DcpMetadata metadata,
                       ReadDcpMetadata(File("sharded", "metadata")));
  const std::map<std::string, DcpTensor> tensors = ByName(metadata);
  const DcpTensor& rows = tensors.at("model.w");
  ASSERT_EQ(rows.chunks.size(), 2u);
  EXPECT_THAT(rows.info.shape, ElementsAre(5, 7));
  EXPECT_THAT(rows.chunks[1].box.offsets, ElementsAre(3, 0));
  EXPECT_EQ(First("sharded", metadata, rows, 1), 21);
  const DcpTensor& columns = tensors.at("model.column");
  EXPECT_THAT(columns.chunks[1].box.offsets, ElementsAre(0, 2));
  EXPECT_EQ(First("sharded", metadata, columns, 1), 2);
  // The second rank has none of it.
  EXPECT_EQ(tensors.at("model.row").chunks.size(), 1u);
  EXPECT_EQ(tensors.at("model.replicated").chunks.size(), 1u);
}

TEST(DcpReaderTest, StridesThatAreNotRowMajor) {
  ASSERT_OK_AND_ASSIGN(const DcpMetadata metadata,
                       ReadDcpMetadata(File("transposed", "metadata")));
  const std::string file = File("transposed", "__0_0.distcp");
  const DcpTensor& tensor = metadata.tensors[0];
  EXPECT_THAT(
      FindChunkBytes(tensor, tensor.chunks[0], testing::ReadFrom(file))
          .status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("tensor \"t\", its chunk at [0, 0]: its strides [1, "
                         "3] are not row-major: save it with .contiguous()")));
  DcpTensor other = tensor;
  other.info.dtype = Dtype::kI32;
  EXPECT_THAT(
      FindChunkBytes(other, other.chunks[0], testing::ReadFrom(file)).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("has F32[3, 2] instead of I32[3, 2]")));
}

std::string With(std::string text, absl::string_view from,
                 absl::string_view to) {
  EXPECT_EQ(from.size(), to.size());
  const size_t at = text.find(std::string(from));
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, to.size(), std::string(to));
}

TEST(DcpReaderTest, HostileMetadata) {
  const std::string metadata = File("sharded", "metadata");
  const std::pair<std::string, std::string> kCases[] = {
      {With(metadata, "__0_0.distcp", "../../passwd"),
       "its file \"../../passwd\" is not inside of the checkpoint: refused"},
      {With(metadata, "__0_0.distcp", "/etc/passwd "), "is not inside"},
      {With(metadata, "__0_0.distcp", "a//b.distcp "), "is not inside"},
      {With(metadata, "__0_0.distcp", absl::string_view("a\0bcdefghijk", 12)),
       "is not inside"},
      {With(metadata, "_StorageInfo", "_StoragePref"),
       ".metadata: pickle: "
       "torch.distributed.checkpoint.filesystem._StoragePref is not what a "
       "checkpoint needs"},
      {With(metadata, "relative_path", "relative_patx"),
       "its place in a file is none"},
      {With(metadata, "state_dict_metadata", "state_dict_metadatx"),
       "has no state_dict_metadata"},
      {With(File("megatron_0_15", "metadata"), "MCoreMetadata",
            "MCoreMetadatx"),
       "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadatx is not "
       "what a checkpoint needs"},
      {"N.", "is no Metadata of DCP"},
      {"cposix\nsystem\n.", "nothing was executed"},
      {"", "pickle: ends after 0 bytes"},
  };
  for (const auto& [bytes, why] : kCases) {
    EXPECT_THAT(ReadDcpMetadata(bytes).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  }
}

// The second rank's rows one row earlier, where the first one's are.
TEST(DcpReaderTest, OverlappingChunksAreRefused) {
  const std::string metadata = File("sharded", "metadata");
  const std::string rows("K\x03K\x00\x86", 5);
  EXPECT_THAT(
      ReadDcpMetadata(With(metadata, rows, std::string("K\x02K\x00\x86", 5)))
          .status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("\"model.w\": element [2, 0] is in 2 of its pieces")));
}

}  // namespace
}  // namespace fsdp::checkpoint
