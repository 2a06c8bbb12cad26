#include "checkpoint/dcp/dcp_catalog.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/testing/samples.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/crc32.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

void Put(FileSystem& files, const std::string& path, absl::string_view bytes) {
  ASSERT_OK(ReplaceFile(files, path, bytes));
}

std::vector<std::string> Names(const Catalog& catalog) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : catalog.tensors()) {
    names.push_back(tensor.info.name);
  }
  return names;
}

std::vector<float> Values(FileSystem& files, const std::string& folder,
                          const Catalog& catalog, absl::string_view name) {
  const StoredTensor* const tensor = catalog.Find(name);
  if (tensor == nullptr) return {};
  const int64_t numel = *NumelOf(tensor->info);
  std::vector<float> values(static_cast<size_t>(numel), -1);
  const auto runs = RunsOf(*tensor, 0, numel);
  EXPECT_OK(runs);
  for (const FileRun& run : *runs) {
    const auto file = files.OpenForReading(
        JoinPath(folder, catalog.files()[run.file].name), Caching::kCached);
    EXPECT_OK(file);
    EXPECT_OK((*file)->PRead(
        run.offset,
        absl::MakeSpan(reinterpret_cast<char*>(values.data()) + run.target,
                       static_cast<size_t>(run.bytes))));
  }
  return values;
}

TEST(DcpCatalogTest, OfOneProcess) {
  testing::SimulatedFileSystem files;
  testing::PutDcpSample(files, "plain");
  ASSERT_OK_AND_ASSIGN(const Catalog all, ReadDcpCatalog(files, "/plain"));
  EXPECT_EQ(all.tensors().size(), 8u);
  EXPECT_THAT(Values(files, "/plain", all, "optim.state.w.step"),
              ElementsAre(7));
  ASSERT_NE(all.Find("model.empty"), nullptr);

  DcpCatalogOptions options;
  options.model_only = true;
  ASSERT_OK_AND_ASSIGN(const Catalog model,
                       ReadDcpCatalog(files, "/plain", options));
  EXPECT_THAT(Names(model), UnorderedElementsAre("w", "bf16", "i64", "bool",
                                                 "scalar", "empty"));
  const std::vector<float> values = Values(files, "/plain", model, "w");
  ASSERT_EQ(values.size(), 15u);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], i);

  options.model_only = false;
  options.prefix = "optim.state.w.";
  ASSERT_OK_AND_ASSIGN(const Catalog optimizer,
                       ReadDcpCatalog(files, "/plain", options));
  EXPECT_THAT(Names(optimizer), UnorderedElementsAre("step", "exp_avg"));
}

TEST(DcpCatalogTest, OfTwoRanks) {
  testing::SimulatedFileSystem files;
  testing::PutDcpSample(files, "sharded");
  ASSERT_OK_AND_ASSIGN(const Catalog catalog,
                       ReadDcpCatalog(files, "/sharded"));
  EXPECT_EQ(catalog.files().size(), 2u);
  const std::vector<float> values =
      Values(files, "/sharded", catalog, "model.w");
  ASSERT_EQ(values.size(), 35u);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], i);
  // Cut in columns.
  const std::vector<float> columns =
      Values(files, "/sharded", catalog, "model.column");
  ASSERT_EQ(columns.size(), 20u);
  for (size_t i = 0; i < columns.size(); ++i) {
    EXPECT_EQ(columns[i], i / 4 * 7 + i % 4);
  }
}

// Of rows, one chunk each, in the folder "/ours".
void PutOurs(FileSystem& files, const std::vector<DcpPath>& paths) {
  std::vector<DcpWriteTensor> tensors;
  std::vector<DcpRange> ranges;
  for (const DcpPath& path : paths) {
    ranges.push_back({static_cast<int>(tensors.size()), 0, 12});
    tensors.push_back({{DcpName(path), Dtype::kF32, {3, 4}}, path});
  }
  ASSERT_OK_AND_ASSIGN(const DcpRankFile layout,
                       LayOutDcpFile(0, tensors, ranges, {}, 16));
  std::string file(static_cast<size_t>(layout.bytes), '\0');
  for (const DcpFileChunk& chunk : layout.chunks) {
    std::string bytes(static_cast<size_t>(chunk.bytes), '\0');
    for (int64_t i = 0; i < chunk.bytes / 4; ++i) {
      const auto value =
          static_cast<float>(int64_t{100} * chunk.tensor + chunk.first) +
          static_cast<float>(i);
      std::memcpy(&bytes[static_cast<size_t>(i * 4)], &value, sizeof(value));
    }
    file.replace(static_cast<size_t>(chunk.payload), bytes.size(), bytes);
    for (const ArchivePiece& piece : FrameDcpChunk(
             tensors[static_cast<size_t>(chunk.tensor)], chunk, Crc32(bytes))) {
      file.replace(static_cast<size_t>(piece.offset), piece.bytes.size(),
                   piece.bytes);
    }
  }
  ASSERT_OK_AND_ASSIGN(const std::string metadata,
                       DcpMetadataBytes(tensors, {}, {layout}));
  ASSERT_OK(files.MakeFolder("/ours"));
  Put(files, JoinPath("/ours", layout.name), file);
  Put(files, "/ours/.metadata", metadata);
}

// A model whose own names begin like the item that plain state dicts have.
TEST(DcpCatalogTest, ModelsAsTorchtitanNamesThem) {
  testing::SimulatedFileSystem files;
  PutOurs(files, {{"model.embed.weight"},
                  {"head.weight"},
                  {"optimizer", "state.head.weight.exp_avg"}});
  DcpCatalogOptions options;
  options.model_only = true;
  ASSERT_OK_AND_ASSIGN(const Catalog catalog,
                       ReadDcpCatalog(files, "/ours", options));
  EXPECT_THAT(Names(catalog), ElementsAre("model.embed.weight", "head.weight"));
  EXPECT_EQ(catalog.Find("head.weight")->boxes.size(), 3u);
  EXPECT_THAT(
      Values(files, "/ours", catalog, "head.weight"),
      ElementsAre(100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111));
}

// As with an object that has model and optimizer in its state_dict().
TEST(DcpCatalogTest, ModelsInAnItemOfTheUsers) {
  testing::SimulatedFileSystem files;
  PutOurs(files, {{"app", "model", "head.weight"},
                  {"app", "optim", "state", "head.weight", "exp_avg"}});
  DcpCatalogOptions options;
  options.model_only = true;
  ASSERT_OK_AND_ASSIGN(const Catalog catalog,
                       ReadDcpCatalog(files, "/ours", options));
  EXPECT_THAT(Names(catalog), ElementsAre("head.weight"));
  ASSERT_OK_AND_ASSIGN(const Catalog all, ReadDcpCatalog(files, "/ours"));
  EXPECT_THAT(Names(all), ElementsAre("app.model.head.weight",
                                      "app.optim.state.head.weight.exp_avg"));
}

// Which of two is meant nobody can know, and what is at the top is meant.
TEST(DcpCatalogTest, ModelsInSeveralItems) {
  struct {
    std::vector<DcpPath> paths;
    std::vector<std::string> model;
  } const cases[] = {
      {{{"teacher", "model", "w"}, {"student", "model", "w"}}, {}},
      {{{"ema", "model", "w"}, {"model", "v"}}, {"v"}},
      {{{"ema", "model", "w"}, {"w"}}, {"w"}},
      {{{"ema", "model", "w"}, {"optim", "state", "w", "exp_avg"}}, {}},
      {{{"ema", "model", "w"}, {"optimizer", "state.w.exp_avg"}}, {}},
  };
  DcpCatalogOptions options;
  options.model_only = true;
  for (const auto& c : cases) {
    testing::SimulatedFileSystem files;
    PutOurs(files, c.paths);
    ASSERT_OK_AND_ASSIGN(const Catalog catalog,
                         ReadDcpCatalog(files, "/ours", options));
    EXPECT_THAT(Names(catalog), ElementsAreArray(c.model));
  }
}

TEST(DcpCatalogTest, WhatIsRefused) {
  testing::SimulatedFileSystem files;
  PutOurs(files, {{"model", "w"}, {"ema", "w"}});
  EXPECT_THAT(ReadDcpCatalog(files, "/other").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/.metadata")));
  const std::string path = "/ours/__0_0.distcp";
  ASSERT_OK_AND_ASSIGN(const auto file,
                       files.OpenForWriting(path, Caching::kCached));
  ASSERT_OK_AND_ASSIGN(const int64_t size, file->Size());
  // The end of the first chunk's zip.
  ASSERT_OK(file->PWrite(1000, std::string(1000, 'x')));
  EXPECT_THAT(ReadDcpCatalog(files, "/ours").status(),
              StatusIs(kInvalid,
                       ::testing::AllOf(HasSubstr("/ours/__0_0.distcp: tensor "
                                                  "\"model.w\", its chunk"))));
  ASSERT_OK(file->SetSize(size - 1));
  DcpCatalogOptions options;
  options.prefix = "ema.";
  EXPECT_THAT(ReadDcpCatalog(files, "/ours", options).status(),
              StatusIs(kInvalid, HasSubstr("but tensor \"w\" is in ")));
  ASSERT_OK(files.RemoveFile(path));
  EXPECT_THAT(ReadDcpCatalog(files, "/ours").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(path)));
  Put(files, "/ours/.metadata", "no pickle");
  EXPECT_THAT(ReadDcpCatalog(files, "/ours").status(),
              StatusIs(kInvalid, HasSubstr("/ours: .metadata: ")));
}

}  // namespace
}  // namespace fsdp::checkpoint
