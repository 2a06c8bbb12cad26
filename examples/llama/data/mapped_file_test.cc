#include <sys/stat.h>

#include <cstdio>
#include <memory>
#include <string>

#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/testing/written_tokens.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(MappedFileTest, HasTheBytesAlsoOfAFileWithoutAName) {
  const std::string bytes = std::string(10000, 'a') + std::string("\0\xFF", 2);
  WriteFile(PathFor("bytes"), bytes);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const MappedFile> file,
                       MappedFile::Open(PathFor("bytes")));
  std::remove(PathFor("bytes").c_str());
  EXPECT_EQ(file->bytes(), bytes);
}

TEST(MappedFileTest, AnEmptyFileHasNone) {
  WriteFile(PathFor("empty"), "");
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const MappedFile> file,
                       MappedFile::Open(PathFor("empty")));
  EXPECT_THAT(file->bytes(), IsEmpty());
}

TEST(MappedFileTest, WhatIsNotThereIsNotFound) {
  EXPECT_THAT(
      MappedFile::Open(PathFor("missing")),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr(PathFor("missing"))));
}

TEST(MappedFileTest, OnlyFilesAreFiles) {
  ASSERT_EQ(mkfifo(PathFor("fifo").c_str(), 0600), 0);
  for (const std::string& path : {PathFor("fifo"), PathFor(".")}) {
    EXPECT_THAT(MappedFile::Open(path),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(path)));
  }
}

}  // namespace
}  // namespace llama
