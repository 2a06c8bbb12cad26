// What the simulated disk may lose, and what it may not.
#include "base/files/testing/simulated_file_system.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/testing/status_matchers.h"

namespace fsdp::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Code = absl::StatusCode;

constexpr int kSeeds = 200;

void Write(File& file, int64_t offset, const std::string& bytes) {
  ASSERT_OK(
      file.PWrite(offset, absl::MakeConstSpan(bytes.data(), bytes.size())));
}

// Returns all states after a loss of power behind `change` of a folder with one
// synced file of two synced pages 'a': names, and the two pages of the file
// "f".
template <typename Change>
std::set<std::string> Outcomes(Change change) {
  std::set<std::string> outcomes;
  for (int seed = 0; seed < kSeeds; ++seed) {
    SimulatedFileSystem files;
    {
      auto file = *files.OpenForWriting("/f", Caching::kCached);
      Write(*file, 0, std::string(8192, 'a'));
      EXPECT_OK(file->Sync());
      EXPECT_OK(files.SyncFolder("/"));
      change(files, *file);
    }
    files.LosePower(seed);
    std::string text = absl::StrJoin(*files.List("/"), " ");
    const auto contents = ReadFile(files, "/f", 1 << 20);
    if (contents.ok() && contents->size() >= 8192) {
      absl::StrAppend(&text, " ", contents->substr(4095, 2));
    }
    outcomes.insert(text);
  }
  return outcomes;
}

TEST(SimulatedFileSystemTest, PagesAreLostOneByOne) {
  EXPECT_THAT(Outcomes([](FileSystem&, File& file) {
                Write(file, 0, std::string(8192, 'b'));
              }),
              UnorderedElementsAre("f aa", "f ab", "f ba", "f bb"));
  EXPECT_THAT(Outcomes([](FileSystem&, File& file) {
                Write(file, 0, std::string(8192, 'b'));
                EXPECT_OK(file.Sync());
              }),
              UnorderedElementsAre("f bb"));
}

TEST(SimulatedFileSystemTest, NamesAreLostOneByOneButRenamesAreWhole) {
  EXPECT_THAT(Outcomes([](FileSystem& files, File&) {
                EXPECT_OK(files.MakeFolder("/g"));
                EXPECT_OK(files.MakeFolder("/h"));
              }),
              UnorderedElementsAre("f aa", "f g aa", "f h aa", "f g h aa"));
  EXPECT_THAT(Outcomes([](FileSystem& files, File&) {
                EXPECT_OK(files.Rename("/f", "/g"));
              }),
              UnorderedElementsAre("f aa", "g"));
  EXPECT_THAT(Outcomes([](FileSystem& files, File&) {
                EXPECT_OK(files.Rename("/f", "/g"));
                EXPECT_OK(files.SyncFolder("/"));
              }),
              UnorderedElementsAre("g"));
  EXPECT_THAT(Outcomes([](FileSystem& files, File&) {
                EXPECT_OK(files.RemoveFile("/f"));
              }),
              UnorderedElementsAre("f aa", ""));
}

TEST(SimulatedFileSystemTest, AKilledProcessLosesNothingButItsFilesAndLocks) {
  SimulatedFileSystem files;
  auto file = *files.OpenForWriting("/f", Caching::kCached);
  Write(*file, 0, "abc");
  auto lock = *files.Lock("/lock", "it");
  files.KillProcess();
  EXPECT_EQ(*ReadFile(files, "/f", 9), "abc");
  EXPECT_THAT(file->Sync(), StatusIs(Code::kAborted, HasSubstr("/f")));
  const auto again = files.Lock("/lock", "another");
  EXPECT_OK(again);
  lock = nullptr;  // the dead process's lock frees nothing
  EXPECT_THAT(files.Lock("/lock", "third"),
              StatusIs(Code::kFailedPrecondition, HasSubstr("another")));
}

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
  EXPECT_THAT(*files.List("/"), ::testing::ElementsAre("keep"));
}

}  // namespace
}  // namespace fsdp::testing
