#include "tools/checkpoint/new_output.h"

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(NewOutputTest, AFolderAppearsWhenItIsWhole) {
  SimulatedFileSystem files;
  {
    ASSERT_OK_AND_ASSIGN(
        NewOutput output,
        NewOutput::Create(files, "/out/", NewOutput::Kind::kFolder, 10));
    EXPECT_EQ(output.path(), "/out.incomplete");
    ASSERT_OK(ReplaceFile(files, output.path() + "/a", "text"));
    EXPECT_THAT(*files.List("/"), ElementsAre("out.incomplete"));
    ASSERT_OK(output.Commit());
  }
  EXPECT_THAT(*files.List("/"), ElementsAre("out"));
  files.LosePower(1);
  EXPECT_THAT(*files.List("/out"), ElementsAre("a"));
}

TEST(NewOutputTest, WithoutCommitNothingRemains) {
  SimulatedFileSystem files;
  {
    ASSERT_OK_AND_ASSIGN(
        NewOutput folder,
        NewOutput::Create(files, "/a", NewOutput::Kind::kFolder, 0));
    ASSERT_OK(ReplaceFile(files, folder.path() + "/x", "text"));
    ASSERT_OK_AND_ASSIGN(
        const NewOutput file,
        NewOutput::Create(files, "/b", NewOutput::Kind::kFile, 0));
    ASSERT_OK(ReplaceFile(files, file.path(), "text"));
  }
  EXPECT_THAT(*files.List("/"), IsEmpty());
}

TEST(NewOutputTest, WhatIsThereIsNotTouched) {
  SimulatedFileSystem files(/*capacity_bytes=*/1000);
  ASSERT_OK(ReplaceFile(files, "/a", "old"));
  ASSERT_OK(ReplaceFile(files, "/b.incomplete", "old"));
  const auto create = [&files](const char* path, int64_t bytes) {
    return NewOutput::Create(files, path, NewOutput::Kind::kFile, bytes)
        .status();
  };
  EXPECT_THAT(create("/a", 0), StatusIs(absl::StatusCode::kAlreadyExists,
                                        HasSubstr("not written over")));
  EXPECT_THAT(create("/b", 0), StatusIs(absl::StatusCode::kAlreadyExists,
                                        HasSubstr("then remove it")));
  EXPECT_THAT(create("/c", 5000), StatusIs(absl::StatusCode::kResourceExhausted,
                                           HasSubstr("will have 5.00 kB")));
  EXPECT_THAT(create("/no/such", 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no")));
  EXPECT_THAT(*files.List("/"), ElementsAre("a", "b.incomplete"));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
