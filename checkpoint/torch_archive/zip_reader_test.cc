#include "checkpoint/torch_archive/zip_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/torch_archive/testing/memory_file.h"
#include "checkpoint/torch_archive/zip_format.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

absl::StatusOr<ZipReader> Open(absl::string_view file) {
  return ZipReader::Open(testing::ReadFrom(file), 0,
                         static_cast<int64_t>(file.size()));
}

std::string Sample() {
  return testing::ReadWholeFile(
      "checkpoint/torch_archive/testing/data/archive.pt");
}

// `value` over the bytes at `at` behind the n-th "PK" + `mark`.
std::string With(std::string file, uint32_t mark, int n, size_t at,
                 uint64_t value, int bytes) {
  std::string signature;
  zip::Put(signature, mark, 4);
  size_t found = file.find(signature);
  for (; n > 0; --n) found = file.find(signature, found + 4);
  EXPECT_NE(found, std::string::npos);
  std::string text;
  zip::Put(text, value, bytes);
  file.replace(found + at, text.size(), text);
  return file;
}

TEST(ZipReaderTest, EntriesOfASample) {
  const std::string file = Sample();
  ASSERT_OK_AND_ASSIGN(ZipReader zip, Open(file));
  EXPECT_EQ(zip.entries().size(), 7u);
  EXPECT_EQ(zip.Find("archive/none"), nullptr);
  const ZipEntry* const version = zip.Find("archive/version");
  ASSERT_NE(version, nullptr);
  ASSERT_OK_AND_ASSIGN(const std::string text, zip.Read(*version, 10));
  EXPECT_EQ(text, "3\n");
  EXPECT_THAT(zip.Read(*version, 1).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("has 2 bytes; 1 are read")));
}

TEST(ZipReaderTest, HostileOnes) {
  const std::string file = Sample();
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  const std::pair<std::string, std::string> kCases[] = {
      {"", "cannot be a zip"},
      {std::string(21, 'P'), "cannot be a zip"},
      {std::string(22, 'P'), "is it torn off?"},
      {absl::StrCat(file, "x"), "is it torn off?"},
      {With(file, zip::kEnd, 0, 4, 1, 2), "spans several disks"},
      {With(file, zip::kEnd64Locator, 0, 8, kHuge, 8), "its end of 64 bits"},
      {With(file, zip::kEnd64, 0, 0, 0, 4), "has no end of 64 bits"},
      {With(file, zip::kEnd64, 0, 16, 1, 4), "spans several disks"},
      {With(file, zip::kEnd64, 0, 32, kHuge, 8), "not in front of its end"},
      {With(file, zip::kEnd64, 0, 32, 1000, 8), "1000 entries cannot have"},
      {With(file, zip::kEnd64, 0, 32, 6, 8), "more than its entries"},
      {With(file, zip::kEnd64, 0, 40, kHuge, 8), "not in front of its end"},
      {With(file, zip::kEnd64, 0, 48, kHuge, 8), "not in front of its end"},
      {With(file, zip::kCentralHeader, 1, 0, 0, 4), "entry 1 of its directory"},
      {With(file, zip::kCentralHeader, 0, 8, 1, 2), "is encrypted"},
      {With(file, zip::kCentralHeader, 0, 10, 8, 2), "is compressed"},
      {With(file, zip::kCentralHeader, 0, 20, 1, 4), "is compressed"},
      {With(file, zip::kCentralHeader, 0, 20, kHuge, 8), "outside of the zip"},
      {With(file, zip::kCentralHeader, 0, 20, 0x40000000400, 8), "overlaps"},
      {With(file, zip::kCentralHeader, 1, 42, 0, 4), "overlaps"},
      {With(file, zip::kCentralHeader, 0, 42, 1 << 30, 4), "outside"},
      {With(file, zip::kCentralHeader, 6, 28, 60000, 2), "torn off"},
  };
  for (const auto& [bytes, why] : kCases) {
    EXPECT_THAT(Open(bytes).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  }
}

TEST(ZipReaderTest, LocalHeadersThatSayAnotherThing) {
  for (const auto& [at, value] :
       {std::pair<size_t, uint64_t>{0, 7}, {26, 4}, {28, 0xffff}}) {
    const std::string file = With(Sample(), zip::kLocalHeader, 0, at, value, 2);
    ASSERT_OK_AND_ASSIGN(ZipReader zip, Open(file));
    EXPECT_THAT(zip.PayloadOffset(zip.entries()[0]).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("entry \"archive/data.pkl\" has")));
  }
}

TEST(ZipReaderTest, PlacesThatAreNone) {
  const std::string file = Sample();
  const ReadAt read = testing::ReadFrom(file);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const auto& [offset, length] :
       {std::pair<int64_t, int64_t>{-1, 100}, {kMax, kMax}, {0, -1}}) {
    EXPECT_THAT(ZipReader::Open(read, offset, length).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("cannot be a zip")));
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
