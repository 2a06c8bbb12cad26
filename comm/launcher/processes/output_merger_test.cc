#include "comm/launcher/processes/output_merger.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::EndsWith;
using ::testing::StartsWith;

constexpr OutputStream kOut = OutputStream::kStdout;
constexpr OutputStream kErr = OutputStream::kStderr;

std::vector<std::string> Labels() {
  return {RankLabel("", 0), RankLabel("", 1), RankLabel("", 2)};
}

// What is queued for `stream`; takes at most `piece` bytes at a time.
std::string Take(OutputMerger& merger, OutputStream stream = kOut,
                 size_t piece = 7) {
  std::string taken;
  while (!merger.empty()) {
    const auto [to, bytes] = merger.front();
    const size_t count = std::min(piece, bytes.size());
    if (to == stream) absl::StrAppend(&taken, bytes.substr(0, count));
    merger.Consume(count);
  }
  EXPECT_EQ(merger.queued_bytes(), 0);
  return taken;
}

TEST(OutputMergerTest, KeepsTheLinesOfRanksWhole) {
  OutputMerger merger(false, false, Labels());
  merger.Append(0, kOut, "one ");
  merger.Append(1, kOut, "two\nthr");
  merger.Append(0, kOut, "line\n\n");
  merger.Append(1, kOut, "ee\n");
  EXPECT_EQ(Take(merger), "[1] two\n[0] one line\n[0] \n[1] three\n");
}

TEST(OutputMergerTest, LinesMayHaveOtherLabelsOrNone) {
  OutputMerger merger(false, true, {RankLabel("12.", 3), ""});
  merger.Append(0, kOut, "a\n");
  merger.Append(1, kOut, "[0.0] b\n");
  EXPECT_EQ(Take(merger), "[12.3] a\n[0.0] b\n");
  merger.Append(0, kErr, "\r10%");
  EXPECT_EQ(Take(merger, kErr), "\r\x1b[K[12.3] 10%");
}

TEST(OutputMergerTest, StreamsAreApartAndInOrder) {
  OutputMerger merger(false, false, Labels());
  merger.Append(2, kOut, "a");
  merger.Append(2, kErr, "b\n");
  EXPECT_EQ(merger.front().stream, kErr);
  EXPECT_EQ(merger.front().bytes, "[2] b\n");
  EXPECT_EQ(merger.queued_bytes(), 6);
  EXPECT_EQ(Take(merger, kErr), "[2] b\n");
}

TEST(OutputMergerTest, SaysLinesOfItsOwn) {
  OutputMerger merger(false, false, Labels());
  merger.Append(1, kOut, "one\n");
  merger.Say("over");
  EXPECT_EQ(merger.front().stream, kOut);
  EXPECT_EQ(Take(merger, kErr), "over\n");
}

// The rank that showed it is gone.
TEST(OutputMergerTest, WhatItSaysEndsProgress) {
  OutputMerger merger(true, true, Labels());
  merger.Append(0, kOut, "\r50%");
  Take(merger);
  merger.Say("over");
  EXPECT_EQ(Take(merger, kErr), "\r\x1b[Kover\n");
  merger.Say("out");
  EXPECT_EQ(Take(merger, kErr), "out\n");
}

TEST(OutputMergerTest, EndsTheLastLineOfAStream) {
  OutputMerger merger(false, false, Labels());
  merger.Append(0, kOut, "no end");
  merger.Close(0, kOut);
  merger.Close(0, kErr);
  merger.Close(0, kOut);
  EXPECT_EQ(Take(merger), "[0] no end\n");
}

TEST(OutputMergerTest, EndsEndlessLines) {
  OutputMerger merger(false, false, Labels());
  const std::string block(1 << 16, 'x');
  for (size_t sent = 0; sent < OutputMerger::kMaxLine; sent += block.size()) {
    EXPECT_TRUE(merger.empty());
    merger.Append(0, kOut, block);
  }
  const std::string line = Take(merger, kOut, 4096);
  EXPECT_EQ(line.size(), OutputMerger::kMaxLine + 5);
  EXPECT_THAT(line, StartsWith("[0] xxx"));
  EXPECT_THAT(line, EndsWith("xxx\n"));
}

TEST(OutputMergerTest, CarriageReturnsAreBytesOutsideTerminals) {
  OutputMerger merger(false, true, Labels());
  merger.Append(0, kOut, "\r10%\r20%");
  EXPECT_TRUE(merger.empty());
  merger.Append(0, kOut, "\r30%\n");
  EXPECT_EQ(Take(merger), "[0] \r10%\r20%\r30%\n");
}

TEST(OutputMergerTest, TerminalShowsProgressAtOnce) {
  OutputMerger merger(true, true, Labels());
  merger.Append(0, kOut, "\rstep 1");
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] step 1");
  merger.Append(0, kOut, "0");
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] step 10");
  merger.Append(0, kOut, "\rstep 11\r");
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] step 11");
  merger.Append(0, kOut, "step 12\r");
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] step 12");
}

TEST(OutputMergerTest, ProgressStaysBelowLines) {
  OutputMerger merger(true, true, Labels());
  merger.Append(0, kOut, "\r50%");
  Take(merger);
  merger.Append(1, kErr, "warning\n");
  EXPECT_EQ(Take(merger, kErr), "\r\x1b[K[1] warning\n[0] 50%");
  merger.Append(0, kOut, "\rdone\n");
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] done\n");
  merger.Append(1, kOut, "plain\n");
  EXPECT_EQ(Take(merger), "[1] plain\n");
}

TEST(OutputMergerTest, ProgressEndsWithItsStream) {
  OutputMerger merger(true, false, Labels());
  merger.Append(0, kOut, "\r50%");
  Take(merger);
  merger.Close(0, kOut);
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] 50%\n");
}

TEST(OutputMergerTest, ProgressMayBeCleared) {
  OutputMerger merger(true, false, Labels());
  merger.Append(0, kOut, "\r50%");
  merger.Append(1, kOut, "\r");
  merger.Append(0, kOut, "\r");
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] 50%");
  merger.Append(0, kOut, "\x1b[K\rtext\n");
  EXPECT_EQ(Take(merger), "\r\x1b[K[0] text\n");
}

}  // namespace
}  // namespace fsdp::comm
