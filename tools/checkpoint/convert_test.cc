#include "tools/checkpoint/convert.h"

#include <cerrno>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/files/testing/faulty_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::FaultyFileSystem;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FlipByte;
using testing::Floats;
using ::testing::HasSubstr;
using testing::ModelFiles;
using ::testing::Not;
using testing::RankFiles;
using testing::ReadAll;
using testing::SaveRun;
using testing::SmallModel;
using testing::SmallTensor;
using testing::WriteFolder;

ConvertOptions To(const std::string& format) {
  ConvertOptions options;
  options.to = format;
  return options;
}

// The bytes of SmallModel() by name, after `prefix`.
std::map<std::string, std::string> Model(const std::string& prefix = "") {
  std::map<std::string, std::string> model;
  for (const SmallTensor& tensor : SmallModel()) {
    model[prefix + tensor.info.name] = tensor.bytes;
  }
  return model;
}

TEST(ConvertTest, FromEveryFormatToEveryOther) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel(), "model", 40)));
  for (const std::string from : {"hf", "dcp", "torch"}) {
    if (from != "hf") {
      ASSERT_OK(Convert(files, "/hf", "/" + from, To(from)));
    }
    for (const std::string to : {"hf", "dcp", "torch"}) {
      const std::string out = absl::StrCat("/", from, "-", to);
      ASSERT_OK(Convert(files, "/" + from, out, To(to))) << out;
      ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, out));
      EXPECT_EQ(all, Model(to == "dcp" ? "model." : "")) << out;
    }
  }
}

// The same bytes, whatever the way there.
TEST(ConvertTest, BackToTheSameFile) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  ASSERT_OK_AND_ASSIGN(const std::string text,
                       Convert(files, "/hf", "/model.pt", To("torch")));
  EXPECT_THAT(text, HasSubstr("/model.pt: 5 tensors in 1 file, "));
  ASSERT_OK(Convert(files, "/model.pt", "/back", To("hf")));
  ASSERT_OK_AND_ASSIGN(const std::string before,
                       ReadFile(files, "/hf/model.safetensors", 1 << 20));
  ASSERT_OK_AND_ASSIGN(const std::string after,
                       ReadFile(files, "/back/model.safetensors", 1 << 20));
  // Within a file, tensors are in the order of their elements' sizes.
  EXPECT_EQ(before.size(), after.size());
  EXPECT_THAT(*files.List("/back"), ElementsAre("model.safetensors"));
}

TEST(ConvertTest, TheModelOfACheckpoint) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(Convert(files, "/run", "/out", To("hf")));
  ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/out"));
  EXPECT_EQ(all, Model());
}

TEST(ConvertTest, CastsFloats) {
  SimulatedFileSystem files;
  ASSERT_OK(
      WriteFolder(files, "/hf",
                  ModelFiles(std::vector<SmallTensor>{
                      Floats("x", {3}, {1, 65519, 1.00390625F}),
                      {{"n", Dtype::kI32, {1}}, std::string("\1\0\0\0", 4)}})));
  ConvertOptions options = To("torch");
  options.write.dtype = Dtype::kF16;
  int64_t done = 0;
  options.write.progress = [&done](int64_t now, int64_t total) {
    done = now;
    EXPECT_EQ(total, 16);
  };
  ASSERT_OK(Convert(files, "/hf", "/f16", options));
  EXPECT_EQ(done, 16);
  ASSERT_OK_AND_ASSIGN(auto all, ReadAll(files, "/f16"));
  EXPECT_EQ(all["x"], std::string("\x00\x3c\xff\x7b\x04\x3c", 6));
  EXPECT_EQ(all["n"], std::string("\1\0\0\0", 4));
  options.write.dtype = Dtype::kI32;
  EXPECT_THAT(Convert(files, "/hf", "/i32", options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("F64, F32, BF16 and F16 are possible")));
}

// 65520 and more are rounded to infinity.
TEST(ConvertTest, RefusesWhatWouldBecomeInfinite) {
  SimulatedFileSystem files;
  const float infinite = std::numeric_limits<float>::infinity();
  ASSERT_OK(WriteFolder(files, "/in",
                        ModelFiles(std::vector<SmallTensor>{
                            Floats("x", {3}, {1, infinite, -65520})})));
  for (const std::string to : {"hf", "dcp", "torch"}) {
    ConvertOptions options = To(to);
    options.write.dtype = Dtype::kF16;
    EXPECT_THAT(
        Convert(files, "/in", "/" + to, options),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("x has the value -65520, which would become "
                           "infinite in F16: convert to F32 (--dtype)")));
    options.write.dtype = Dtype::kBF16;
    EXPECT_OK(Convert(files, "/in", "/" + to, options));
  }
}

TEST(ConvertTest, SeveralFiles) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  ConvertOptions options = To("dcp");
  options.write.max_file_bytes = 40;
  ASSERT_OK(Convert(files, "/hf", "/dcp", options));
  EXPECT_THAT(*files.List("/dcp"), ElementsAre(".metadata", "__0_0.distcp",
                                               "__1_0.distcp", "__2_0.distcp"));
  options.to = "hf";
  ASSERT_OK(Convert(files, "/dcp", "/back", options));
  ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/back"));
  EXPECT_EQ(all, Model());
}

TEST(ConvertTest, NamesOfTheStateDict) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  ConvertOptions options = To("dcp");
  options.write.dcp_item = "";
  ASSERT_OK(Convert(files, "/hf", "/top", options));
  ASSERT_OK_AND_ASSIGN(const auto top, ReadAll(files, "/top"));
  EXPECT_EQ(top, Model());
  options.to = "torch";
  options.write.prefix = "sca";
  ASSERT_OK(Convert(files, "/top", "/one", options));
  ASSERT_OK_AND_ASSIGN(const auto one, ReadAll(files, "/one"));
  EXPECT_EQ(one.size(), 1u);
  EXPECT_EQ(one.count("lar"), 1u);
  options.write.prefix = "model.";
  EXPECT_THAT(Convert(files, "/top", "/none", options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no tensor whose name begins with")));
}

// Copies a file of samples that Python wrote.
void Copy(const std::string& from, FileSystem& files, const std::string& to) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes,
                       ReadFile(RealFileSystem(), from, 1 << 20));
  ASSERT_OK(ReplaceFile(files, to, bytes));
}

TEST(ConvertTest, WhatTorchSaveWrote) {
  const std::string data = "checkpoint/torch_archive/testing/data";
  SimulatedFileSystem files;
  Copy(data + "/mixed.pt", files, "/mixed.pt");
  EXPECT_THAT(Convert(files, "/mixed.pt", "/out", To("hf")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("ordered.t: its strides")));
  Copy(data + "/module.pt", files, "/module.pt");
  ASSERT_OK(Convert(files, "/module.pt", "/out", To("hf")));
  ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/out"));
  EXPECT_EQ(all.size(), 2u);
  EXPECT_EQ(all.at("weight").size(), 24u);
}

TEST(ConvertTest, WhatTwoRanksOfPythonWrote) {
  const std::string data = "checkpoint/dcp/testing/data";
  SimulatedFileSystem files;
  ASSERT_OK(files.MakeFolder("/dcp"));
  Copy(data + "/sharded/metadata", files, "/dcp/.metadata");
  for (const char* name : {"__0_0.distcp", "__1_0.distcp"}) {
    Copy(absl::StrCat(data, "/sharded/", name), files,
         absl::StrCat("/dcp/", name));
  }
  ASSERT_OK(Convert(files, "/dcp", "/out", To("hf")));
  ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/out"));
  std::string numbers;
  for (int i = 0; i < 35; ++i) {
    const auto number = static_cast<float>(i);
    numbers.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  EXPECT_EQ(all.at("w"), numbers);
  EXPECT_EQ(all.count("model.w"), 0u);
}

TEST(ConvertTest, Refusals) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  ASSERT_OK(files.MakeFolder("/there"));
  EXPECT_THAT(Convert(files, "/hf", "/out", To("onnx")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("hf, dcp and torch are possible")));
  EXPECT_THAT(Convert(files, "/hf", "/there", To("hf")),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("/there")));
  EXPECT_THAT(Convert(files, "/none", "/out", To("hf")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/none")));
  EXPECT_THAT(*files.List("/"), ElementsAre("hf", "there"));
}

TEST(ConvertTest, OfDamagedFilesNothingRemains) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(FlipByte(files, "/run/step-3/model.safetensors", 4100));
  EXPECT_THAT(
      Convert(files, "/run", "/out", To("hf")),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("model.safetensors")));
  EXPECT_THAT(*files.List("/"), ElementsAre("run"));
  ConvertOptions options = To("hf");
  options.unchecked = true;
  EXPECT_OK(Convert(files, "/run", "/out", options));
}

TEST(ConvertTest, OfAFullDiskNothingRemains) {
  SimulatedFileSystem disk;
  ASSERT_OK(WriteFolder(disk, "/hf", ModelFiles(SmallModel())));
  for (const char* format : {"hf", "dcp", "torch"}) {
    FaultyFileSystem count(disk);
    ASSERT_OK(
        Convert(count, "/hf", absl::StrCat("/", format, "-out"), To(format)));
    for (int64_t call = 0; call < count.calls(); ++call) {
      FaultyFileSystem files(disk);
      files.FailCall(call, ENOSPC, /*for_good=*/false);
      const absl::Status status =
          Convert(files, "/hf", "/out", To(format)).status();
      if (status.ok()) {  // what failed was to tidy up
        ASSERT_OK(disk.Rename("/out", "/whole"));
        ASSERT_OK_AND_ASSIGN(const auto whole, ReadAll(disk, "/whole"));
        const bool dcp = format == std::string("dcp");
        EXPECT_EQ(whole, Model(dcp ? "model." : ""));
        ASSERT_OK(disk.Stat("/whole")->kind == FileInfo::Kind::kFolder
                      ? RemoveTree(disk, "/whole")
                      : disk.RemoveFile("/whole"));
      } else {
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                                     HasSubstr("/out")));
        EXPECT_THAT(*disk.List("/"), Not(::testing::Contains("out")));
      }
    }
  }
}

TEST(ConvertTest, NeedsSpaceAndANameThatIsFree) {
  SimulatedFileSystem disk(/*capacity_bytes=*/20000);
  ASSERT_OK(WriteFolder(disk, "/hf", ModelFiles(SmallModel())));
  ASSERT_OK(WriteFolder(disk, "/out.incomplete", {{"left", "behind"}}));
  EXPECT_THAT(Convert(disk, "/hf", "/hf", To("dcp")),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("not written over")));
  ASSERT_OK(ReplaceFile(disk, "/full", std::string(*disk.FreeBytes("/"), 'x')));
  for (const char* format : {"hf", "dcp", "torch"}) {
    EXPECT_THAT(Convert(disk, "/hf", "/out", To(format)),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr("/out will have "),
                               HasSubstr("free space there"))));
    EXPECT_THAT(*disk.List("/"), ElementsAre("full", "hf"));
  }
}

TEST(ConsolidateTest, ThePiecesOfRanks) {
  for (const int ranks : {1, 2, 3, 7}) {
    SimulatedFileSystem files;
    ASSERT_OK(WriteFolder(files, "/ranks", RankFiles(SmallModel(), ranks)));
    ASSERT_OK(Consolidate(files, "/ranks", "/out", {}));
    EXPECT_THAT(*files.List("/out"), ElementsAre("model.safetensors"));
    ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/out"));
    EXPECT_EQ(all, Model());
    // As if ranks had written them together.
    for (const auto& [name, bytes] : ModelFiles(SmallModel())) {
      EXPECT_EQ(*ReadFile(files, JoinPath("/out", name), 1 << 20), bytes);
    }
  }
}

TEST(ConsolidateTest, Refusals) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  EXPECT_THAT(Consolidate(files, "/hf", "/out", {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("use checkpoint convert --to=hf")));
  // A rank's file is missing.
  testing::SmallTensor tensor = SmallModel()[0];
  auto contents = RankFiles({&tensor, 1}, 3);
  contents.erase(contents.begin());
  ASSERT_OK(WriteFolder(files, "/ranks", contents));
  EXPECT_THAT(Consolidate(files, "/ranks", "/out", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"w\"")));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
