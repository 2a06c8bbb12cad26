#include "comm/launcher/output_merger.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/startup/bootstrap_socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

constexpr OutputStream kOut = OutputStream::kStdout;
constexpr OutputStream kErr = OutputStream::kStderr;

std::vector<std::string> Labels() {
  return {RankLabel("", 0), RankLabel("", 1), RankLabel("", 2)};
}

// Takes what is queued for `stream`, at most `piece` bytes at a time.
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

TEST(OutputMergerTest, StreamsAreApartAndInOrder) {
  OutputMerger merger(false, false, Labels());
  merger.Append(2, kOut, "a");
  merger.Append(2, kErr, "b\n");
  EXPECT_EQ(merger.front().stream, kErr);
  EXPECT_EQ(merger.front().bytes, "[2] b\n");
  EXPECT_EQ(merger.queued_bytes(), 6);
  EXPECT_EQ(Take(merger, kErr), "[2] b\n");
}

// The rank that showed the progress is gone.
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
  EXPECT_THAT(line, ::testing::StartsWith("[0] xxx"));
  EXPECT_THAT(line, ::testing::EndsWith("xxx\n"));
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

constexpr absl::Duration kLimit = absl::Seconds(20);

struct Pipe {
  Pipe() {
    int fds[2];
    FSDP_CHECK(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0);
    read.Reset(fds[0]);
    write.Reset(fds[1]);
  }
  void Print(absl::string_view text) const {
    FSDP_CHECK(::write(write.get(), text.data(), text.size()) ==
               static_cast<ssize_t>(text.size()));
  }

  UniqueFd read;
  UniqueFd write;
};

std::string TextOf(const UniqueFd& file) {
  std::string text;
  char buffer[4096];
  lseek(file.get(), 0, SEEK_SET);
  for (ssize_t count; (count = read(file.get(), buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(count));
  }
  return text;
}

UniqueFd File() { return UniqueFd(memfd_create("output", MFD_CLOEXEC)); }

// Two processes that print, and where it goes.
class OutputPumpTest : public ::testing::Test {
 protected:
  OutputPump Pump(int stdout_fd, int stderr_fd) const {
    return OutputPump({{zero_.read.get(), zero_errors_.read.get(), "[0] "},
                       {one_.read.get(), /*stderr_fd=*/-1, "[1] "}},
                      stdout_fd, stderr_fd);
  }

  void Drain(OutputPump& pump) const {
    const absl::Time deadline = absl::Now() + kLimit;
    while (!pump.is_empty() && absl::Now() < deadline) {
      pump.Poll(wake_.read.get(), deadline);
    }
    EXPECT_TRUE(pump.is_empty());
  }

  Pipe zero_;
  Pipe zero_errors_;
  Pipe one_;
  const Pipe wake_;
};

TEST_F(OutputPumpTest, MovesLinesToTheirStreams) {
  const UniqueFd out = File();
  const UniqueFd err = File();
  OutputPump pump = Pump(out.get(), err.get());
  zero_.Print("a\nhalf");
  zero_errors_.Print("b\n");
  pump.Poll(wake_.read.get(), absl::Now() + kLimit);
  Drain(pump);
  EXPECT_EQ(TextOf(out), "[0] a\n");
  EXPECT_EQ(TextOf(err), "[0] b\n");
  zero_.Print(" and half\n");
  one_.Print("the last");
  pump.CloseSources();
  pump.Say("said");
  Drain(pump);
  EXPECT_EQ(TextOf(out), "[0] a\n[0] half and half\n[1] the last\n");
  EXPECT_EQ(TextOf(err), "[0] b\nsaid\n");
  EXPECT_EQ(pump.error(), 0);
}

TEST_F(OutputPumpTest, WaitsForNothingThatIsNotToCome) {
  const UniqueFd out = File();
  OutputPump pump = Pump(out.get(), out.get());
  wake_.Print("x");
  pump.Poll(wake_.read.get(), absl::InfiniteFuture());
  const Pipe silent;
  pump.Poll(silent.read.get(), absl::Now());
  zero_.write.Reset();
  pump.Poll(silent.read.get(), absl::InfiniteFuture());
  pump.Poll(silent.read.get(), absl::Now());
  EXPECT_TRUE(pump.is_empty());
}

TEST_F(OutputPumpTest, AFullDiskIsAnErrorAndTheOtherStreamGoesOn) {
  const UniqueFd full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  const UniqueFd err = File();
  OutputPump pump = Pump(full.get(), err.get());
  zero_.Print("lost\n");
  zero_errors_.Print("kept\n");
  pump.CloseSources();
  Drain(pump);
  EXPECT_EQ(pump.error(), ENOSPC);
  EXPECT_EQ(TextOf(err), "[0] kept\n");
}

TEST_F(OutputPumpTest, ThatNobodyReadsIsNoError) {
  signal(SIGPIPE, SIG_IGN);
  Pipe closed;
  closed.read.Reset();
  const UniqueFd err = File();
  OutputPump pump = Pump(closed.write.get(), err.get());
  zero_.Print("lost\n");
  pump.CloseSources();
  Drain(pump);
  EXPECT_EQ(pump.error(), 0);
  signal(SIGPIPE, SIG_DFL);
}

TEST_F(OutputPumpTest, AReaderThatDoesNotReadDoesNotBlock) {
  const Pipe out;
  fcntl(out.write.get(), F_SETFL, 0);  // as a terminal's are
  OutputPump pump = Pump(out.write.get(), out.write.get());
  const std::string line = std::string(999, 'x') + "\n";
  for (int i = 0; i < 200; ++i) {
    one_.Print(line);
    pump.Poll(wake_.read.get(), absl::Now());
  }
  EXPECT_FALSE(pump.is_empty());
}

}  // namespace
}  // namespace fsdp::comm
