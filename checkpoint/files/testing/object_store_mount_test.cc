#include "checkpoint/files/testing/object_store_mount.h"

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kRefused = absl::StatusCode::kUnimplemented;

absl::Status WriteAt(File& file, int64_t offset, absl::string_view bytes) {
  return file.PWrite(offset, absl::MakeConstSpan(bytes.data(), bytes.size()));
}

TEST(ObjectStoreMountTest, FilesAreWrittenOnceAndInOrder) {
  SimulatedFileSystem disk;
  ObjectStoreMount files(disk);
  ASSERT_OK_AND_ASSIGN(const auto file,
                       files.OpenForWriting("/a", Caching::kCached));
  EXPECT_OK(WriteAt(*file, 0, "one"));
  EXPECT_THAT(WriteAt(*file, 0, "two"), StatusIs(kRefused, HasSubstr("/a")));
  EXPECT_THAT(WriteAt(*file, 4, "two"), StatusIs(kRefused, HasSubstr("/a")));
  EXPECT_THAT(file->SetSize(9), StatusIs(kRefused, HasSubstr("/a")));
  EXPECT_OK(WriteAt(*file, 3, " two"));
  EXPECT_OK(file->Sync());
  EXPECT_EQ(*ReadFile(files, "/a", 9), "one two");
  EXPECT_THAT(WriteAt(*file, 7, "!"), StatusIs(kRefused, HasSubstr("/a")));
  EXPECT_THAT(files.OpenForWriting("/a", Caching::kCached),
              StatusIs(kRefused, HasSubstr("/a")));
  EXPECT_OK(files.RemoveFile("/a"));
  EXPECT_OK(WriteNewFile(files, "/a", "again"));
}

TEST(ObjectStoreMountTest, NothingIsRenamedOrLocked) {
  SimulatedFileSystem disk;
  ObjectStoreMount files(disk);
  ASSERT_OK(WriteNewFile(files, "/a", ""));
  EXPECT_THAT(files.Rename("/a", "/b"), StatusIs(kRefused, HasSubstr("/b")));
  EXPECT_THAT(files.Lock("/l", "me"), StatusIs(kRefused, HasSubstr("/l")));
}

TEST(ObjectStoreMountTest, AFolderGoesWithItsLastFile) {
  SimulatedFileSystem disk;
  ObjectStoreMount files(disk);
  ASSERT_OK(WriteNewFile(files, "/keep", ""));
  ASSERT_OK(files.MakeFolder("/f"));
  ASSERT_OK(WriteNewFile(files, "/f/a", ""));
  ASSERT_OK(WriteNewFile(files, "/f/b", ""));
  EXPECT_OK(RemoveTree(files, "/f"));
  EXPECT_THAT(*files.List("/"), ElementsAre("keep"));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
