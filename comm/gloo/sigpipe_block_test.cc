#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "comm/gloo/message_transport.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

bool IsBlocked() {
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  return sigismember(&mask, SIGPIPE) == 1;
}

// Writes to a pipe that nobody reads. The test program ends if the signal is
// not blocked.
int ErrorOfWriting() {
  int ends[2];
  if (pipe(ends) != 0) return errno;
  close(ends[0]);
  const int error = write(ends[1], "x", 1) == 1 ? 0 : errno;
  close(ends[1]);
  return error;
}

TEST(SigpipeBlockTest, WritesFailAndTheSignalIsForgotten) {
  {
    const SigpipeBlock block;
    EXPECT_EQ(ErrorOfWriting(), EPIPE);
  }
  EXPECT_FALSE(IsBlocked());
}

TEST(SigpipeBlockTest, ThreadsKeepIt) {
  std::thread thread;
  int error = 0;
  {
    const SigpipeBlock block;
    thread = std::thread([&] { error = ErrorOfWriting(); });
  }
  thread.join();
  EXPECT_EQ(error, EPIPE);
}

TEST(SigpipeBlockTest, LeavesAnOuterBlockAlone) {
  const SigpipeBlock outer;
  { const SigpipeBlock inner; }
  EXPECT_TRUE(IsBlocked());
}

}  // namespace
}  // namespace fsdp::comm
