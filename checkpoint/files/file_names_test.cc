#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/new_path.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(FileNamesTest, WhatLeavesTheFolderIsRefused) {
  const std::string nul("a\0b", 3);
  const std::string names[] = {"",     ".", "..",
                               "a\\b", nul, std::string(256, 'a')};
  for (const std::string& name : names) {
    EXPECT_THAT(CheckPlainFileName(name),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("is no name of a file in")));
    EXPECT_FALSE(CheckRelativePath(name).ok());
    EXPECT_FALSE(CheckRelativePath("a/" + name).ok());
    EXPECT_FALSE(CheckRelativePath(name + "/a").ok());
  }
  for (absl::string_view path : {"/etc/passwd", "a//b", "a/", "a/../../b"}) {
    EXPECT_FALSE(CheckPlainFileName(path).ok());
    EXPECT_FALSE(CheckRelativePath(path).ok());
  }
  EXPECT_THAT(CheckPlainFileName(nul).message(), HasSubstr("\"a\\000b\""));
}

TEST(FileNamesTest, OthersAreAccepted) {
  for (const std::string& name :
       {std::string("a..b"), std::string("..."), std::string(255, 'a')}) {
    EXPECT_OK(CheckPlainFileName(name));
    EXPECT_OK(CheckRelativePath(name));
  }
  EXPECT_FALSE(CheckPlainFileName("sharded/model.safetensors").ok());
  EXPECT_OK(CheckRelativePath("sharded/model.safetensors"));
  std::string deep = "a";
  for (int i = 0; i < 3000; ++i) deep += "/a";
  EXPECT_THAT(CheckRelativePath(deep).message(), HasSubstr("4096"));
}

TEST(FileNamesTest, ThePartsOfAPathAreAllOfIt) {
  struct {
    const char* path;
    const char* folder;
    const char* last;
  } const cases[] = {{"optimizer/exp_avg", "optimizer/", "exp_avg"},
                     {"a/b/c", "a/b/", "c"},
                     {"model.safetensors", "", "model.safetensors"},
                     {"a/", "a/", ""},
                     {"/a", "/", "a"},
                     {"", "", ""}};
  for (const auto& c : cases) {
    EXPECT_EQ(FolderPart(c.path), c.folder) << c.path;
    EXPECT_EQ(LastPart(c.path), c.last) << c.path;
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
