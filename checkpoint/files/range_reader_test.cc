#include "checkpoint/files/range_reader.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/real_files.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::RandomBytes;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

RangeReaderOptions Small() {
  RangeReaderOptions options;
  options.chunk_bytes = 2 * kBlockBytes;
  options.chunks = 2;
  return options;
}

FileSums SumsOf(const std::string& bytes) {
  std::vector<FilePiece> pieces;
  AppendPieces(0, 0, bytes, pieces);
  return (
      *CombinePieces(pieces, {{"f", static_cast<int64_t>(bytes.size())}}))[0];
}

class RangeReaderTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    for (const int64_t size : {9 * kBlockBytes + 12347, kBlockBytes / 2}) {
      contents_.push_back(RandomBytes(size));
      sums_.push_back(SumsOf(contents_.back()));
      paths_.push_back(absl::StrCat("/f", paths_.size()));
      ASSERT_OK(ReplaceFile(files_, paths_.back(), contents_.back()));
    }
  }

  std::unique_ptr<RangeReader> Reader(FileSystem& files) {
    std::vector<SourceFile> sources;
    sources.reserve(paths_.size());
    for (size_t i = 0; i < paths_.size(); ++i) {
      sources.push_back({paths_[i], GetParam() ? &sums_[i] : nullptr});
    }
    return *RangeReader::Create(files, sources, Small());
  }

  // Reads and compares what is handed out.
  absl::Status ReadAndCompare(RangeReader& reader,
                              const std::vector<FilePlace>& ranges) {
    std::vector<std::string> found(ranges.size());
    size_t last = 0;
    const auto take = [&](size_t range, int64_t position,
                          absl::Span<const char> bytes) {
      EXPECT_GE(range, last);
      last = range;
      EXPECT_EQ(position, static_cast<int64_t>(found[range].size()));
      found[range].append(bytes.data(), bytes.size());
      return absl::OkStatus();
    };
    absl::Status status = reader.Read(ranges, take);
    for (size_t i = 0; i < ranges.size() && status.ok(); ++i) {
      EXPECT_TRUE(found[i] == contents_[ranges[i].file].substr(ranges[i].offset,
                                                               ranges[i].bytes))
          << "range " << i;
    }
    return status;
  }

  std::vector<FilePlace> RandomRanges(int count, int64_t largest) {
    std::vector<FilePlace> ranges;
    for (int i = 0; i < count; ++i) {
      FilePlace range;
      range.file = static_cast<int64_t>(random_() % 2);
      const auto size = static_cast<int64_t>(contents_[range.file].size());
      range.offset = static_cast<int64_t>(random_() % (size + 1));
      range.bytes = std::min(static_cast<int64_t>(random_() % largest),
                             size - range.offset);
      ranges.push_back(range);
    }
    return ranges;
  }

  SimulatedFileSystem files_;
  std::vector<std::string> paths_;
  std::vector<std::string> contents_;
  std::vector<FileSums> sums_;
  std::mt19937 random_{5};
};

INSTANTIATE_TEST_SUITE_P(Checked, RangeReaderTest, ::testing::Bool());

TEST_P(RangeReaderTest, RandomRanges) {
  const auto reader = Reader(files_);
  for (const int64_t largest : {1, 100, 5000, 3 << 20, 8 << 20}) {
    std::vector<FilePlace> ranges = RandomRanges(30, largest);
    EXPECT_OK(ReadAndCompare(*reader, ranges));
    std::sort(ranges.begin(), ranges.end(),
              [](const FilePlace& a, const FilePlace& b) {
                return std::make_pair(a.file, a.offset) <
                       std::make_pair(b.file, b.offset);
              });
    EXPECT_OK(ReadAndCompare(*reader, ranges));
  }
  EXPECT_OK(ReadAndCompare(*reader, {}));
  EXPECT_OK(ReadAndCompare(*reader, {{0, 7, 0}, {1, 0, 0}}));
}

TEST_P(RangeReaderTest, WithoutThreadsItReadsItself) {
  const ::fsdp::testing::NoThreads none;
  EXPECT_OK(ReadAndCompare(*Reader(files_), RandomRanges(20, 3 << 20)));
}

TEST_P(RangeReaderTest, ABlockIsReadOnceInFileOrder) {
  FaultyFileSystem counting(files_);
  const auto reader = Reader(counting);
  const auto size = static_cast<int64_t>(contents_[0].size());
  for (int64_t at = 0; at < size; at += 300007) {
    EXPECT_OK(ReadAndCompare(*reader,
                             {{0, at, std::min<int64_t>(300007, size - at)}}));
  }
  // Without checksums whole pages are read, those at ends of ranges twice.
  const int64_t before = counting.read_bytes();
  EXPECT_LE(before, size + (GetParam() ? 0 : 40 * 4096));
  std::vector<FilePlace> ranges;
  for (int64_t at = 0; at + 1000 <= size; at += 1000) {
    ranges.push_back({0, at, 997});
  }
  EXPECT_OK(ReadAndCompare(*reader, ranges));
  EXPECT_LE(counting.read_bytes(), before + size);
}

TEST_P(RangeReaderTest, WhatWasHandedOutStaysUntilItMayGo) {
  const auto reader = Reader(files_);
  const FilePlace all{0, 0, static_cast<int64_t>(contents_[0].size())};
  std::vector<std::pair<int64_t, absl::Span<const char>>> handed_out;
  const auto take = [&](size_t, int64_t position,
                        absl::Span<const char> bytes) {
    handed_out.emplace_back(position, bytes);
    return absl::OkStatus();
  };
  int times = 0;
  const auto let_go = [&] {
    for (const auto& [position, bytes] : handed_out) {
      EXPECT_EQ(contents_[0].compare(position, bytes.size(), bytes.data(),
                                     bytes.size()),
                0);
    }
    handed_out.clear();
    ++times;
    return absl::OkStatus();
  };
  EXPECT_OK(reader->Read({all}, take, let_go));
  EXPECT_EQ(times, 4);  // of five chunks the last stays
  EXPECT_OK(let_go());
  EXPECT_THAT(
      reader->Read({all}, take, [] { return absl::CancelledError("not yet"); }),
      StatusIs(Code::kCancelled, HasSubstr("not yet")));
  EXPECT_OK(ReadAndCompare(*reader, {all}));
}

TEST_P(RangeReaderTest, FewOfManyFilesAreOpen) {
  constexpr int kFiles = 300;
  std::vector<SourceFile> sources;
  const FileSums sums = SumsOf(contents_[1]);
  std::vector<FilePlace> ranges;
  for (int i = 0; i < kFiles; ++i) {
    sources.push_back({absl::StrCat("/many", i), GetParam() ? &sums : nullptr});
    ASSERT_OK(ReplaceFile(files_, sources.back().path, contents_[1]));
    ranges.push_back({i, 5, 10});
  }
  FaultyFileSystem counting(files_);
  const auto reader = *RangeReader::Create(counting, sources, Small());
  std::vector<std::string> found(kFiles);
  const auto take = [&](size_t i, int64_t, absl::Span<const char> bytes) {
    found[i].append(bytes.data(), bytes.size());
    return absl::OkStatus();
  };
  ASSERT_OK(reader->Read(ranges, take));
  EXPECT_EQ(found,
            std::vector<std::string>(kFiles, contents_[1].substr(5, 10)));
  EXPECT_LE(counting.most_open(), RangeReader::kMostOpenFiles + Small().chunks);
  EXPECT_EQ(counting.opened(), 2 * kFiles);  // to see all sizes, and to read
  ASSERT_OK(reader->Read({ranges[kFiles - 2], ranges[kFiles - 1]}, take));
  EXPECT_EQ(counting.opened(), 2 * kFiles);
}

TEST_P(RangeReaderTest, AFileThatIsAnotherOneWhenItIsOpenedAgainIsRefused) {
  for (int i = 0; i < RangeReader::kMostOpenFiles; ++i) {
    contents_.push_back("other");
    sums_.push_back(SumsOf(contents_.back()));
    paths_.push_back(absl::StrCat("/other", i));
    ASSERT_OK(ReplaceFile(files_, paths_.back(), contents_.back()));
  }
  const auto reader = Reader(files_);
  EXPECT_OK(ReadAndCompare(*reader, {{1, 0, 5}}));
  ASSERT_OK(ReplaceFile(files_, paths_[1], contents_[1] + "more"));
  for (size_t i = 2; i < paths_.size(); ++i) {
    EXPECT_OK(ReadAndCompare(*reader, {{static_cast<int64_t>(i), 0, 5}}));
  }
  EXPECT_THAT(
      ReadAndCompare(*reader, {{1, 0, 5}}),
      StatusIs(Code::kDataLoss, HasSubstr("/f1: it has 524292 bytes instead")));
}

TEST_P(RangeReaderTest, WhatThereIsNotIsRefused) {
  const auto reader = Reader(files_);
  const auto size = static_cast<int64_t>(contents_[1].size());
  EXPECT_THAT(ReadAndCompare(*reader, {{1, size, 1}}),
              StatusIs(Code::kOutOfRange, HasSubstr("of /f1: it has 524288")));
  EXPECT_FALSE(ReadAndCompare(*reader, {{1, -1, 1}}).ok());
  EXPECT_FALSE(ReadAndCompare(*reader, {{1, 1, INT64_MAX}}).ok());
  EXPECT_OK(ReadAndCompare(*reader, {{1, 0, size}}));
}

class DamageTest : public RangeReaderTest {
 protected:
  void Damage(size_t file, int64_t offset) {
    const auto open = *files_.OpenForWriting(paths_[file], Caching::kCached);
    const char flipped = static_cast<char>(contents_[file][offset] ^ 1);
    ASSERT_OK(open->PWrite(offset, absl::MakeConstSpan(&flipped, 1)));
  }
};

INSTANTIATE_TEST_SUITE_P(Checked, DamageTest, ::testing::Values(true));

TEST_P(DamageTest, AFlippedBitIsNamedAndNothingOfItsBlockIsHandedOut) {
  Damage(0, 5 * kBlockBytes + 3);
  const auto reader = Reader(files_);
  int64_t handed_out = 0;
  const auto take = [&](size_t, int64_t, absl::Span<const char> bytes) {
    handed_out += static_cast<int64_t>(bytes.size());
    return absl::OkStatus();
  };
  EXPECT_THAT(
      reader->Read({{0, 0, 9 * kBlockBytes}}, take),
      StatusIs(
          Code::kDataLoss,
          ::testing::AllOf(
              HasSubstr("/f0, bytes [5242880, 6291456): their CRC32C is "),
              HasSubstr(absl::StrCat(
                  "instead of ", absl::Hex(sums_[0].blocks[5], absl::kZeroPad8),
                  "; the file is damaged; load an older checkpoint")))));
  EXPECT_EQ(handed_out, 4 * kBlockBytes);  // all chunks before its own
  // Other blocks are as good as before.
  EXPECT_OK(ReadAndCompare(*reader, {{0, 6 * kBlockBytes, 3 * kBlockBytes}}));
  EXPECT_FALSE(ReadAndCompare(*reader, {{0, 5 * kBlockBytes, 1}}).ok());
  // Damage is found before the wanted bytes of a block, too.
  EXPECT_FALSE(ReadAndCompare(*reader, {{0, 5 * kBlockBytes + 9, 1}}).ok());
}

TEST_P(DamageTest, AnotherSizeIsNamed) {
  const auto open = *files_.OpenForWriting("/f1", Caching::kCached);
  ASSERT_OK(open->SetSize(kBlockBytes / 2 - 1));
  EXPECT_THAT(
      ReadAndCompare(*Reader(files_), {{1, 0, 1}}),
      StatusIs(Code::kDataLoss,
               HasSubstr("/f1: it has 524287 bytes instead of 524288")));
  ASSERT_OK(files_.RemoveFile("/f1"));
  EXPECT_THAT(ReadAndCompare(*Reader(files_), {{1, 0, 1}}),
              StatusIs(Code::kNotFound, HasSubstr("/f1")));
}

TEST_P(DamageTest, AnErrorOfTakeEndsIt) {
  const auto reader = Reader(files_);
  const auto take = [](size_t, int64_t, absl::Span<const char>) {
    return absl::CancelledError("enough");
  };
  EXPECT_THAT(reader->Read({{0, 0, 9 * kBlockBytes}}, take),
              StatusIs(Code::kCancelled, HasSubstr("enough")));
  EXPECT_OK(ReadAndCompare(*reader, {{0, 0, 9 * kBlockBytes}}));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
