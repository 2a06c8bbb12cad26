#include "checkpoint/save/dcp_export.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/files/testing/faulty_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/run/tensor_parts.h"
#include "checkpoint/run/torch_dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/value.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

// A tensor of a run; its elements count from `first`.
struct Tensor {
  TensorInfo info;
  int first = 0;
  c10::ScalarType dtype = c10::kFloat;  // of the values
  bool whole = false;                   // rank 0 has all of it

  int64_t numel() const { return *NumelOf(info); }
  at::Tensor Values() const {
    return at::arange(first, first + numel(), at::kFloat).to(dtype);
  }
};

const std::vector<std::pair<std::string, std::vector<Tensor>>>& Groups() {
  static const auto* const groups =
      new std::vector<std::pair<std::string, std::vector<Tensor>>>{
          {"model",
           {{{"a.weight", Dtype::kF32, {5, 7, 3}}, 0},
            {{"a.bias", Dtype::kBF16, {11}}, 200},  // cast on its way
            {{"scalar", Dtype::kF32, {}}, 7},
            {{"empty", Dtype::kF32, {0, 3}}, 0},
            {{"count", Dtype::kI64, {4}}, 9, c10::kLong, true}}},
          {"optimizer/exp_avg", {{{"a.weight", Dtype::kF32, {5, 7, 3}}, 500}}},
      };
  return *groups;
}

// This rank's even part of each.
std::vector<TensorGroup> PartsOf(int rank, int world_size) {
  std::vector<TensorGroup> groups;
  for (const auto& [stem, tensors] : Groups()) {
    TensorGroup& group = groups.emplace_back();
    group.stem = stem;
    for (const Tensor& tensor : tensors) {
      int64_t begin = tensor.numel() * rank / world_size;
      int64_t end = tensor.numel() * (rank + 1) / world_size;
      if (tensor.whole) {
        begin = 0;
        end = rank == 0 ? tensor.numel() : 0;
      }
      group.parts.push_back(
          {tensor.info, begin, tensor.Values().slice(0, begin, end)});
    }
  }
  return groups;
}

DcpExportOptions Options() {
  DcpExportOptions options;
  options.max_chunk_bytes = 64;
  options.numbers = {{"a.weight", {{"step", 3}}}};
  options.values = {
      {{"optim", "param_groups", int64_t{0}, "lr"}, Value{0.125}}};
  options.writer.buffer_bytes = int64_t{1} << 20;
  options.writer.buffers = 2;
  return options;
}

std::vector<absl::Status> ExportAll(FileSystem& files,
                                    const std::string& folder, int world_size,
                                    const DcpExportOptions& options) {
  if (world_size == 1) {
    return {WriteDcp(files, folder, PartsOf(0, 1), nullptr, options)};
  }
  return comm::testing::RunRanks(
      world_size, [&](comm::Communicator& ranks) -> absl::Status {
        return WriteDcp(files, folder, PartsOf(ranks.rank(), world_size),
                        &ranks, options);
      });
}

absl::StatusOr<at::Tensor> ReadTensor(FileSystem& files,
                                      const std::string& folder,
                                      const Catalog& catalog,
                                      const std::string& name) {
  const StoredTensor* const stored = catalog.Find(name);
  if (stored == nullptr) return absl::NotFoundError(name);
  const int64_t numel = *NumelOf(stored->info);
  at::Tensor values = at::empty({numel}, *TorchDtype(stored->info.dtype));
  FSDP_ASSIGN_OR_RETURN(const std::vector<FileRun> runs,
                        RunsOf(*stored, 0, numel));
  for (const FileRun& run : runs) {
    const std::string path = JoinPath(folder, catalog.files()[run.file].name);
    FSDP_ASSIGN_OR_RETURN(const auto file,
                          files.OpenForReading(path, Caching::kCached));
    FSDP_RETURN_IF_ERROR(file->PRead(
        run.offset,
        absl::MakeSpan(static_cast<char*>(values.data_ptr()) + run.target,
                       static_cast<size_t>(run.bytes))));
  }
  return values;
}

void ExpectAll(FileSystem& files, const std::string& folder, DcpNames names) {
  ASSERT_OK_AND_ASSIGN(const Catalog catalog, ReadDcpCatalog(files, folder));
  const bool plain = names == DcpNames::kPlain;
  const std::string slots = plain ? "optim.state." : "optimizer.state.";
  size_t count = 1;
  for (const auto& [stem, tensors] : Groups()) {
    const bool is_model = stem == "model";
    for (const Tensor& tensor : tensors) {
      const std::string name =
          is_model ? absl::StrCat(plain ? "model." : "", tensor.info.name)
                   : absl::StrCat(slots, tensor.info.name, ".exp_avg");
      ASSERT_OK_AND_ASSIGN(const at::Tensor values,
                           ReadTensor(files, folder, catalog, name));
      EXPECT_TRUE(values.equal(tensor.Values().to(values.scalar_type())))
          << name;
      ++count;
    }
  }
  EXPECT_EQ(catalog.tensors().size(), count);
  ASSERT_OK_AND_ASSIGN(
      const at::Tensor step,
      ReadTensor(files, folder, catalog, slots + "a.weight.step"));
  EXPECT_EQ(step.item<float>(), 3);
}

TEST(DcpExportTest, WhatRanksWriteIsReadBack) {
  for (const int world_size : {1, 2, 3}) {
    for (const DcpNames names : {DcpNames::kPlain, DcpNames::kTorchtitan}) {
      testing::SimulatedFileSystem files;
      DcpExportOptions options = Options();
      options.names = names;
      for (const absl::Status& status :
           ExportAll(files, "/out", world_size, options)) {
        ASSERT_OK(status);
      }
      ExpectAll(files, "/out", names);
      DcpCatalogOptions model;
      model.model_only = true;
      ASSERT_OK_AND_ASSIGN(const Catalog catalog,
                           ReadDcpCatalog(files, "/out", model));
      EXPECT_EQ(catalog.tensors().size(), 5u);
      EXPECT_NE(catalog.Find("a.weight"), nullptr);
      ASSERT_OK_AND_ASSIGN(const std::vector<std::string> left,
                           files.List("/"));
      EXPECT_THAT(left, ::testing::ElementsAre("out"));
    }
  }
}

// Kept for a person's Python to read (checkpoint/testing).
TEST(DcpExportTest, OnARealDisk) {
  const char* const kept = std::getenv("FSDP_DCP_EXPORT");
  const std::string folder = JoinPath(
      kept != nullptr ? std::string(kept) : ::testing::TempDir(), "export");
  for (const absl::Status& status :
       ExportAll(RealFileSystem(), folder, 2, Options())) {
    ASSERT_OK(status);
  }
  ExpectAll(RealFileSystem(), folder, DcpNames::kPlain);
}

// Whatever fails, the folder is whole or not there, all ranks know, and the
// next export works.
TEST(DcpExportTest, EveryCallThatFails) {
  for (const int world_size : {1, 2}) {
    int64_t calls = 1;
    for (int64_t call = 0; call < calls; ++call) {
      testing::SimulatedFileSystem disk;
      testing::FaultyFileSystem files(disk);
      files.FailCall(call, ENOSPC, /*for_good=*/false);
      const auto statuses = ExportAll(files, "/out", world_size, Options());
      calls = std::max(calls, files.calls());
      ASSERT_OK_AND_ASSIGN(const bool exists, Exists(disk, "/out"));
      for (const absl::Status& status : statuses) {
        EXPECT_EQ(status.ok(), exists) << call;
      }
      if (exists) {
        ExpectAll(disk, "/out", DcpNames::kPlain);
        continue;
      }
      for (const absl::Status& status :
           ExportAll(disk, "/out", world_size, Options())) {
        ASSERT_OK(status);
      }
      ExpectAll(disk, "/out", DcpNames::kPlain);
    }
  }
}

TEST(DcpExportTest, WhatIsRefused) {
  testing::SimulatedFileSystem files;
  ASSERT_OK(ExportAll(files, "/out", 1, Options()).front());
  for (const absl::Status& status : ExportAll(files, "/out", 2, Options())) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kAlreadyExists,
                                 HasSubstr("/out is there already")));
  }
  {
    NewPath other(files, "/other", NewPath::Kind::kFolder);
    ASSERT_OK(other.Claim("is another program"));
    for (const absl::Status& status :
         ExportAll(files, "/other", 2, Options())) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                   HasSubstr("which is another program")));
    }
  }
  std::vector<TensorGroup> groups = PartsOf(0, 1);
  groups[1].stem = "ema";
  EXPECT_THAT(WriteDcp(files, "/other", groups, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no place for tensors of ema")));
  EXPECT_THAT(WriteDcp(files, "/other", PartsOf(0, 2), nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("\"model.a.weight\": element [2, 3, 1] is in "
                                 "none")));
  const auto statuses = comm::testing::RunRanks(
      2, [&](comm::Communicator& ranks) -> absl::Status {
        DcpExportOptions options = Options();
        if (ranks.rank() == 1) options.names = DcpNames::kTorchtitan;
        return WriteDcp(files, "/other", PartsOf(ranks.rank(), 2), &ranks,
                        options);
      });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("rank 1 exports other tensors")));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> left, files.List("/"));
  EXPECT_THAT(left, ::testing::ElementsAre("out"));
}

}  // namespace
}  // namespace fsdp::checkpoint
