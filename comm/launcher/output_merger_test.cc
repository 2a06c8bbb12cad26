#include "comm/launcher/output_merger.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

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
  zero_.Print("a\n\nhalf");
  zero_errors_.Print("b\n");
  pump.Poll(wake_.read.get(), absl::Now() + kLimit);
  Drain(pump);
  EXPECT_EQ(ReadAll(out.get()), "[0] a\n[0] \n");
  EXPECT_EQ(ReadAll(err.get()), "[0] b\n");
  zero_.Print(" and half\n");
  one_.Print("the last");
  pump.CloseSources();
  pump.Say("said");
  Drain(pump);
  EXPECT_EQ(ReadAll(out.get()),
            "[0] a\n[0] \n[0] half and half\n[1] the last\n");
  EXPECT_EQ(ReadAll(err.get()), "[0] b\nsaid\n");
  EXPECT_EQ(pump.error(), 0);
}

TEST_F(OutputPumpTest, EndsEndlessLines) {
  const UniqueFd out = File();
  OutputPump pump = Pump(out.get(), out.get());
  const std::string block(1 << 16, '\r');
  for (size_t sent = 0; sent < OutputPump::kMaxLine; sent += block.size()) {
    EXPECT_TRUE(pump.is_empty());
    zero_.Print(block);
    pump.Poll(wake_.read.get(), absl::Now() + kLimit);
  }
  Drain(pump);
  EXPECT_EQ(
      ReadAll(out.get()),
      absl::StrCat("[0] ", std::string(OutputPump::kMaxLine, '\r'), "\n"));
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
  EXPECT_EQ(ReadAll(err.get()), "[0] kept\n");
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

}  // namespace
}  // namespace fsdp::comm
