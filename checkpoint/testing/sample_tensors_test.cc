#include "checkpoint/testing/sample_tensors.h"

#include <filesystem>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/files/file_system.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/testing/dcp_run.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::testing::UnorderedElementsAreArray;

std::vector<std::string> Lines(const std::vector<SampleTensor>& tensors) {
  std::vector<std::string> lines;
  lines.reserve(tensors.size());
  for (const SampleTensor& tensor : tensors) lines.push_back(LineOf(tensor));
  return lines;
}

TEST(SampleTensorsTest, EveryFormatIsReadBack) {
  const std::vector<SampleTensor> tensors = PatternTensors();
  for (const std::string format : {"safetensors", "huggingface", "shards"}) {
    for (const int ranks : {1, 2, 3}) {
      const std::string path =
          JoinPath(::testing::TempDir(), absl::StrCat(format, ranks));
      ASSERT_OK(WriteSample(tensors, format, path, ranks)) << format;
      ASSERT_OK_AND_ASSIGN(const auto read, ReadSample(path));
      EXPECT_THAT(Lines(read), UnorderedElementsAreArray(Lines(tensors)))
          << format << ranks;
    }
  }
  EXPECT_THAT(WriteSample(tensors, "npz", ::testing::TempDir(), 1),
              ::fsdp::testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                        ::testing::HasSubstr("no format npz")));
}

// What tools/checks/checkpoint_with_python has recorded, and what Python's
// libraries said that they had written.
TEST(SampleTensorsTest, WhatPythonWrote) {
  for (const std::string sample : {"safetensors", "transformers",
                                   "transformers_indexed", "dcp_hf_shards"}) {
    const std::string folder =
        absl::StrCat("checkpoint/testing/data/", sample, "/");
    std::vector<std::string> expected;
    std::ifstream file(folder + "lines.txt");
    for (std::string line; std::getline(file, line);) expected.push_back(line);
    EXPECT_THAT(expected, ::testing::Not(::testing::IsEmpty())) << sample;
    ASSERT_OK_AND_ASSIGN(const auto read, ReadSample(folder + "model"));
    EXPECT_THAT(Lines(read), UnorderedElementsAreArray(expected)) << sample;
  }
}

// What check_with_python.py recorded: what tools/interop/dcp.py made of FSDP2's
// files after five steps on two ranks, and FSDP2's losses from there.
TEST(DcpRunTest, GoesOnWhereFsdp2Was) {
  for (const char* const style : {"plain", "torchtitan"}) {
    const std::string folder =
        absl::StrCat("checkpoint/testing/data/dcp_adamw_", style);
    SCOPED_TRACE(folder);
    DcpRun run;
    run.folder = absl::StrCat(::testing::TempDir(), "/", style);
    run.optimizer = "AdamW";
    std::filesystem::copy(JoinPath(folder, "model"), run.folder,
                          std::filesystem::copy_options::recursive);
    ASSERT_OK_AND_ASSIGN(const std::vector<double> losses, LoadAndGoOn(run));
    ASSERT_OK_AND_ASSIGN(
        const std::string text,
        ReadFile(RealFileSystem(), JoinPath(folder, "lines.txt"), 1000));
    const std::vector<std::string> lines =
        absl::StrSplit(text, '\n', absl::SkipEmpty());
    ASSERT_EQ(lines.size(), losses.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      double expected = 0;
      ASSERT_TRUE(absl::SimpleAtod(lines[i], &expected)) << lines[i];
      EXPECT_NEAR(losses[i], expected, 1e-6) << i;
    }
  }
}

TEST(DcpRunTest, GoesOnWhereItWasItself) {
  DcpRun run;
  run.folder = absl::StrCat(::testing::TempDir(), "/dcp_run");
  run.optimizer = "AdamW";
  ASSERT_OK_AND_ASSIGN(const std::vector<double> losses, SaveAndGoOn(run));
  ASSERT_OK_AND_ASSIGN(const std::vector<double> again, LoadAndGoOn(run));
  EXPECT_EQ(losses, again);
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
