#include "comm/launcher/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

// No test waits longer than this for something that is due at once.
constexpr absl::Duration kLimit = absl::Seconds(20);

bool WaitFor(int fd, int16_t events) {
  pollfd state = {fd, events, 0};
  return poll(&state, 1, static_cast<int>(absl::ToInt64Milliseconds(kLimit))) ==
         1;
}

// Reads up to the end of `fd`.
std::string ReadAll(int fd) {
  std::string text;
  char buffer[256];
  while (WaitFor(fd, POLLIN)) {
    const ssize_t count = read(fd, buffer, sizeof(buffer));
    if (count <= 0) return text;
    text.append(buffer, static_cast<size_t>(count));
  }
  return text + " and no end";
}

bool IsSoon(const std::function<bool()>& is_true) {
  const absl::Time deadline = absl::Now() + kLimit;
  while (!is_true()) {
    if (absl::Now() > deadline) return false;
    poll(nullptr, 0, 1);
  }
  return true;
}

ProcessEnd EndOf(ChildProcess& child) {
  std::optional<ProcessEnd> end;
  FSDP_CHECK(IsSoon([&] { return (end = child.TryReap()).has_value(); }));
  return *end;
}

ChildProcess::Options Shell(const std::string& script) {
  ChildProcess::Options options;
  options.program = "/bin/sh";
  options.argv = {"sh", "-c", script};
  return options;
}

// Tells whether any process has the other end.
class Leash {
 public:
  Leash() {
    int fds[2];
    FSDP_CHECK(pipe2(fds, O_CLOEXEC) == 0);
    read_.Reset(fds[0]);
    write_.Reset(fds[1]);
  }
  int inherited_fd() const { return write_.get(); }
  bool IsFreeSoon() {
    write_.Reset();
    return WaitFor(read_.get(), 0);
  }

 private:
  UniqueFd read_;
  UniqueFd write_;
};

TEST(ChildProcessTest, ItsOutputAndItsEndAreSeen) {
  ASSERT_OK_AND_ASSIGN(
      ChildProcess child,
      ChildProcess::Start(Shell("cat; echo out; echo err >&2; exit 3")));
  EXPECT_EQ(ReadAll(child.stdout_fd()), "out\n");
  EXPECT_EQ(ReadAll(child.stderr_fd()), "err\n");
  const ProcessEnd end = EndOf(child);
  EXPECT_EQ(end.exit_code, 3);
  EXPECT_EQ(end.signal, 0);
  EXPECT_EQ(child.pid(), 0);
  EXPECT_EQ(child.TryReap(), std::nullopt);
}

TEST(ChildProcessTest, NothingOutlivesTheObject) {
  Leash leash;
  {
    ChildProcess::Options options = Shell("sleep 1000 & echo; wait");
    options.inherited_fd = leash.inherited_fd();
    ASSERT_OK_AND_ASSIGN(const ChildProcess child,
                         ChildProcess::Start(options));
    ASSERT_TRUE(WaitFor(child.stdout_fd(), POLLIN));
  }
  EXPECT_TRUE(leash.IsFreeSoon());
}

TEST(ChildProcessTest, ACopyOfThisProcessRunsAFunction) {
  const int number = 42;
  ASSERT_OK_AND_ASSIGN(ChildProcess child, ChildProcess::Fork([&] {
                         return write(STDOUT_FILENO, "x", 1) == 1 ? number : 1;
                       }));
  EXPECT_EQ(ReadAll(child.stdout_fd()), "x");
  EXPECT_EQ(EndOf(child).exit_code, number);
}

TEST(ChildProcessTest, StopsAreSeenOnce) {
  ASSERT_OK_AND_ASSIGN(ChildProcess child, ChildProcess::Fork([] {
                         raise(SIGSTOP);
                         return 6;
                       }));
  EXPECT_TRUE(IsSoon([&] { return child.HasStopped(); }));
  EXPECT_FALSE(child.HasStopped());
  EXPECT_EQ(child.TryReap(), std::nullopt);
  child.Signal(SIGCONT);
  EXPECT_EQ(EndOf(child).exit_code, 6);
}

int handled = 0;
void Handle(int signal) { handled = signal; }

bool IsReadable(const SignalQueue& queue) {
  pollfd state = {queue.fd(), POLLIN, 0};
  return poll(&state, 1, 0) == 1;
}

TEST(SignalQueueTest, GivesSignalsInsteadOfHandlingThem) {
  ASSERT_OK_AND_ASSIGN(SignalQueue queue, SignalQueue::Create());
  EXPECT_FALSE(IsReadable(queue));
  EXPECT_EQ(queue.Next(), 0);
  for (const int signal :
       {SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGCHLD, SIGQUIT, SIGUSR1}) {
    raise(signal);
    EXPECT_TRUE(IsReadable(queue)) << signal;
    EXPECT_EQ(queue.Next(), signal);
    EXPECT_EQ(queue.Next(), 0);
  }
}

TEST(SignalQueueTest, WhatWasIgnoredComesButNotPastAHandler) {
  signal(SIGCHLD, SIG_IGN);
  signal(SIGQUIT, SIG_IGN);
  signal(SIGUSR1, Handle);
  handled = 0;
  {
    ASSERT_OK_AND_ASSIGN(SignalQueue queue, SignalQueue::Create());
    for (const int signal : {SIGCHLD, SIGQUIT}) {
      raise(signal);
      EXPECT_EQ(queue.Next(), signal);
    }
    raise(SIGUSR1);
    EXPECT_EQ(queue.Next(), 0);
    EXPECT_EQ(handled, SIGUSR1);
  }
  signal(SIGQUIT, SIG_DFL);
  signal(SIGUSR1, SIG_DFL);
  EXPECT_EQ(signal(SIGCHLD, SIG_DFL), SIG_IGN);
}

TEST(SignalQueueTest, WhatWasNotTakenComesAfterwards) {
  signal(SIGTERM, Handle);
  handled = 0;
  {
    ASSERT_OK_AND_ASSIGN(SignalQueue queue, SignalQueue::Create());
    const SignalQueue moved = std::move(queue);
    raise(SIGTERM);
    EXPECT_EQ(handled, 0);
  }
  EXPECT_EQ(handled, SIGTERM);
  signal(SIGTERM, SIG_DFL);
}

}  // namespace
}  // namespace fsdp::comm
