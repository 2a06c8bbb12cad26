#include "tools/checkpoint/torch_file.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kData[] = "checkpoint/torch_archive/testing/data/";

absl::StatusOr<TorchFile> Read(const std::string& name) {
  return ReadTorchFile(RealFileSystem(), kData + name);
}

std::vector<std::string> Names(const Catalog& catalog) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : catalog.tensors()) {
    names.push_back(tensor.info.name);
  }
  return names;
}

TEST(TorchFileTest, FlattensWhatPythonWrote) {
  ASSERT_OK_AND_ASSIGN(const TorchFile file, Read("mixed.pt"));
  EXPECT_THAT(Names(file.catalog), ElementsAre("a", "bf16", "empty", "i64",
                                               "bool", "f8", "u16", "f64"));
  EXPECT_THAT(file.others, Contains("list.1"));
  EXPECT_THAT(file.others, Contains("big"));
  EXPECT_THAT(file.unreadable,
              ElementsAre(HasSubstr("ordered.t: its strides [1, 2] are not "
                                    "row-major")));
  EXPECT_THAT(file.catalog.files()[0].name, "mixed.pt");
}

TEST(TorchFileTest, TensorsOfOneStorage) {
  ASSERT_OK_AND_ASSIGN(const TorchFile file, Read("shared.pt"));
  EXPECT_THAT(Names(file.catalog), ElementsAre("whole", "part"));
  EXPECT_EQ(file.catalog.Find("part")->boxes[0].offset,
            file.catalog.Find("whole")->boxes[0].offset + 16);
}

TEST(TorchFileTest, OneValue) {
  ASSERT_OK_AND_ASSIGN(const TorchFile tensor, Read("archive.pt"));
  EXPECT_THAT(Names(tensor.catalog), ElementsAre("tensor"));
  ASSERT_OK_AND_ASSIGN(const TorchFile number, Read("number.pt"));
  EXPECT_THAT(number.others, ElementsAre("value"));
}

TEST(TorchFileTest, Refusals) {
  EXPECT_THAT(Read("refused_device.pt"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("refused_device.pt: ")));
  EXPECT_THAT(
      IsTorchFile(RealFileSystem(),
                  "checkpoint/torch_archive/testing/data/refused_legacy.pt"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("refused_legacy.pt: is a file of torch.save() of "
                         "before PyTorch 1.6")));
  EXPECT_THAT(Read("no_such.pt"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no_such.pt")));
}

TEST(TorchFileTest, IsToldByItsFirstBytes) {
  SimulatedFileSystem files;
  ASSERT_OK(ReplaceFile(files, "/zip", "PK\x03\x04 and more"));
  ASSERT_OK(ReplaceFile(files, "/short", "PK"));
  ASSERT_OK_AND_ASSIGN(const bool zip, IsTorchFile(files, "/zip"));
  EXPECT_TRUE(zip);
  ASSERT_OK_AND_ASSIGN(const bool other, IsTorchFile(files, "/short"));
  EXPECT_FALSE(other);
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
