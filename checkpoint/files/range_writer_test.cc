#include "checkpoint/files/range_writer.h"

#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/real_files.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint::testing {
namespace {

using Code = absl::StatusCode;
using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::RandomBytes;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kMax = int64_t{1} << 24;

RangeWriterOptions Small() {
  RangeWriterOptions options;
  options.buffer_bytes = kBlockBytes;
  options.buffers = 2;
  return options;
}

// Writes the bytes of `contents` from `offset` on, in order and completely.
absl::Status WriteFrom(RangeWriter& writer, int64_t file,
                       absl::string_view contents, int64_t offset,
                       int64_t bytes) {
  int64_t next = 0;
  const auto fill = [&](int64_t position, absl::Span<char> out) {
    EXPECT_EQ(position, next);
    next += static_cast<int64_t>(out.size());
    std::memcpy(out.data(), contents.data() + offset + position, out.size());
    return absl::OkStatus();
  };
  absl::Status status = writer.Write(file, offset, bytes, fill);
  EXPECT_TRUE(!status.ok() || next == bytes);
  return status;
}

// Writes everything by as many writers, dealing ranges to them at random.
void WriteAsRanks(FileSystem& files, const std::vector<std::string>& paths,
                  const std::vector<std::string>& contents, int ranks) {
  std::mt19937 random(ranks);
  std::vector<FilePiece> pieces;
  std::vector<std::unique_ptr<RangeWriter>> writers;
  writers.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    writers.push_back(*RangeWriter::Create(files, paths, Small()));
  }
  struct Range {
    size_t file;
    int64_t offset;
    int64_t bytes;
  };
  std::vector<Range> ranges;
  std::vector<NamedSize> sizes;
  for (size_t i = 0; i < contents.size(); ++i) {
    const auto total = static_cast<int64_t>(contents[i].size());
    sizes.push_back({paths[i], total});
    ASSERT_OK(writers[0]->SetSize(static_cast<int64_t>(i), total));
    for (int64_t at = 0, size = 0; at < total; at += size) {
      size = std::min(static_cast<int64_t>(random() % (2 * kBlockBytes)),
                      total - at);
      ranges.push_back({i, at, size});
    }
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  for (const Range& range : ranges) {
    ASSERT_OK(WriteFrom(*writers[random() % ranks],
                        static_cast<int64_t>(range.file), contents[range.file],
                        range.offset, range.bytes));
  }
  for (const auto& writer : writers) {
    ASSERT_OK_AND_ASSIGN(const std::vector<FilePiece> more, writer->Finish());
    pieces.insert(pieces.end(), more.begin(), more.end());
  }
  ASSERT_OK_AND_ASSIGN(const auto sums, CombinePieces(pieces, sizes));
  for (size_t i = 0; i < contents.size(); ++i) {
    EXPECT_EQ(*ReadFile(files, paths[i], kMax), contents[i]);
    std::vector<FilePiece> whole;
    AppendPieces(0, 0, contents[i], whole);
    EXPECT_EQ(sums[i], (*CombinePieces(whole, {sizes[i]}))[0]);
  }
}

class RanksTest : public ::testing::TestWithParam<int> {};

TEST_P(RanksTest, WriteTheSameFiles) {
  std::vector<std::string> contents;
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{4096},
                             int64_t{1000003}, 3 * kBlockBytes + 4097}) {
    contents.push_back(RandomBytes(size));
  }
  SimulatedFileSystem simulated;
  std::vector<std::string> paths;
  paths.reserve(contents.size());
  for (size_t i = 0; i < contents.size(); ++i) {
    paths.push_back(absl::StrCat("/file", i));
  }
  WriteAsRanks(simulated, paths, contents, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Numbers, RanksTest, ::testing::Values(1, 2, 3, 8));

TEST(RangeWriterTest, WithoutThreadsItWritesItself) {
  SimulatedFileSystem files;
  const ::fsdp::testing::NoThreads none;
  WriteAsRanks(files, {"/f"}, {RandomBytes(3 * kBlockBytes + 5)}, 2);
}

TEST(RangeWriterTest, RangesThatFollowAreOneWrite) {
  SimulatedFileSystem base;
  FaultyFileSystem files(base);
  auto writer = *RangeWriter::Create(files, {"/f"}, RangeWriterOptions());
  const std::string bytes = RandomBytes(kBlockBytes);
  for (int64_t at = 100; at < 500000; at += 100) {
    ASSERT_OK(WriteFrom(*writer, 0, bytes, at, 100));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<FilePiece> pieces, writer->Finish());
  EXPECT_EQ(pieces.size(), 1);
  EXPECT_EQ(files.calls(), 3);  // open, write, sync
}

// Wherever it stops, what comes first is there, and no more.
TEST(RangeWriterTest, InOrderFilesGrow) {
  const std::string a = RandomBytes(5 * kBlockBytes + 4099);
  const std::string b = RandomBytes(2 * kBlockBytes + 1);
  RangeWriterOptions options = Small();
  options.buffers = 4;
  options.in_order = true;
  for (int64_t call = 0; call < 16; ++call) {
    SimulatedFileSystem base;
    FaultyFileSystem files(base);
    files.StopAtCall(call);
    auto writer = *RangeWriter::Create(files, {"/a", "/b"}, options);
    absl::Status status;
    const auto write = [&](int64_t file, const std::string& bytes,
                           int64_t begin, int64_t end) {
      status.Update(WriteFrom(*writer, file, bytes, begin, end - begin));
    };
    const auto a_bytes = static_cast<int64_t>(a.size());
    write(0, a, 0, 17);
    write(1, b, 0, kBlockBytes);
    write(0, a, 17, 2 * kBlockBytes + 5);
    write(0, a, 2 * kBlockBytes + 5, a_bytes);
    write(1, b, kBlockBytes, static_cast<int64_t>(b.size()));
    status.Update(writer->Finish().status());
    writer.reset();
    for (const auto& [path, bytes] : {std::pair("/a", a), std::pair("/b", b)}) {
      if (!*Exists(base, path)) continue;
      const std::string there = *ReadFile(base, path, kMax);
      EXPECT_TRUE(status.ok() ? there == bytes
                              : bytes.compare(0, there.size(), there) == 0)
          << path << " after " << call << " calls";
    }
  }
}

TEST(RangeWriterTest, AnErrorOfFillIsTheLastWord) {
  SimulatedFileSystem files;
  auto writer = *RangeWriter::Create(files, {"/f"}, Small());
  const auto fails = [](int64_t, absl::Span<char>) {
    return absl::DataLossError("the shard is gone");
  };
  EXPECT_THAT(writer->Write(0, 0, 10, fails),
              StatusIs(Code::kDataLoss, HasSubstr("shard")));
  EXPECT_THAT(writer->Finish(), StatusIs(Code::kDataLoss, HasSubstr("shard")));
}

// Whoever watches a disk hears of every byte and every other call, no sooner
// than the disk is through with it.
TEST(RangeWriterTest, SaysWhatHasComeBackFromTheDisk) {
  SimulatedFileSystem disk;
  FaultyFileSystem files(disk);
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> calls{0};
  RangeWriterOptions options = Small();
  options.came_back = [&](int64_t more) {
    bytes += more;
    ++calls;
    EXPECT_LE(calls, files.calls());
  };
  ASSERT_OK_AND_ASSIGN(const auto writer,
                       RangeWriter::Create(files, {"/a", "/b"}, options));
  const std::string contents = RandomBytes(3 * kBlockBytes + 5);
  ASSERT_OK(writer->WriteBytes(0, 0, contents));
  ASSERT_OK(writer->WriteBytes(1, 7, contents));
  ASSERT_OK(writer->Finish());
  EXPECT_EQ(bytes, 2 * static_cast<int64_t>(contents.size()));
  EXPECT_EQ(calls, files.calls());
}

TEST(RangeWriterTest, ACancellationEndsIt) {
  SimulatedFileSystem files;
  std::atomic<bool> cancelled{false};
  RangeWriterOptions options = Small();
  options.cancelled = &cancelled;
  const std::string bytes = RandomBytes(4 * kBlockBytes);
  ASSERT_OK_AND_ASSIGN(const auto writer,
                       RangeWriter::Create(files, {"/f"}, options));
  ASSERT_OK(writer->WriteBytes(0, 0, bytes));
  cancelled = true;
  EXPECT_THAT(writer->WriteBytes(0, 4 * kBlockBytes, bytes),
              StatusIs(Code::kCancelled, HasSubstr("it was cancelled")));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
