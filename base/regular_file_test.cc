#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/output_file.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

std::string Path(const std::string& name) {
  return absl::StrCat(::testing::TempDir(), "/regular_file_test_", name);
}

TEST(RegularFileTest, IsReadWhole) {
  const std::string text = std::string(3 << 20, 'x') + "end";
  std::ofstream(Path("text")) << text;
  EXPECT_EQ(*ReadRegularFile(Path("text")), text);
  std::ofstream(Path("empty"));
  EXPECT_EQ(*ReadRegularFile(Path("empty")), "");
}

TEST(RegularFileTest, WhatIsNoneIsRefusedAtOnce) {
  const std::string fifo = Path("fifo");
  unlink(fifo.c_str());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const std::string socket_path = Path("socket");
  unlink(socket_path.c_str());
  ASSERT_EQ(mknod(socket_path.c_str(), S_IFSOCK | 0600, 0), 0);
  for (const std::string& path :
       {fifo, socket_path, ::testing::TempDir(), std::string("/dev/zero")}) {
    EXPECT_THAT(
        ReadRegularFile(path),
        StatusIs(Code::kInvalidArgument,
                 AllOf(HasSubstr(path), HasSubstr("is no regular file"))));
  }
  for (const int flags : {O_RDONLY, O_WRONLY, O_RDWR}) {
    EXPECT_EQ(OpenRegularFile(fifo, flags), -1);
    EXPECT_EQ(errno, ENXIO);
  }
  EXPECT_THAT(ReadRegularFile(Path("none")),
              StatusIs(Code::kNotFound, HasSubstr(Path("none"))));
}

}  // namespace
}  // namespace fsdp
