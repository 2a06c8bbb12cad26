#include <poll.h>
#include <signal.h>

#include <utility>

#include "base/testing/status_matchers.h"
#include "comm/launcher/processes/child_process.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

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

TEST(SignalQueueTest, WhatIsIgnoredStaysSo) {
  signal(SIGHUP, SIG_IGN);
  {
    ASSERT_OK_AND_ASSIGN(SignalQueue queue, SignalQueue::Create());
    raise(SIGHUP);
    EXPECT_EQ(queue.Next(), 0);
  }
  EXPECT_EQ(signal(SIGHUP, SIG_DFL), SIG_IGN);
}

TEST(SignalQueueTest, QuestionsComeThoughTheyAreIgnoredButNotPastAHandler) {
  signal(SIGQUIT, SIG_IGN);
  signal(SIGUSR1, Handle);
  handled = 0;
  {
    ASSERT_OK_AND_ASSIGN(SignalQueue queue, SignalQueue::Create());
    raise(SIGQUIT);
    EXPECT_EQ(queue.Next(), SIGQUIT);
    raise(SIGUSR1);
    EXPECT_EQ(queue.Next(), 0);
    EXPECT_EQ(handled, SIGUSR1);
  }
  signal(SIGQUIT, SIG_DFL);
  signal(SIGUSR1, SIG_DFL);
}

TEST(SignalQueueTest, ChildrenAreSeenThoughTheyWereIgnored) {
  signal(SIGCHLD, SIG_IGN);
  {
    ASSERT_OK_AND_ASSIGN(SignalQueue queue, SignalQueue::Create());
    raise(SIGCHLD);
    EXPECT_EQ(queue.Next(), SIGCHLD);
  }
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

// It would end this process.
TEST(SignalQueueTest, QuestionsThatNobodyTookAreForgotten) {
  {
    ASSERT_OK_AND_ASSIGN(const SignalQueue queue, SignalQueue::Create());
    raise(SIGQUIT);
    raise(SIGUSR1);
  }
  sigset_t pending;
  ASSERT_EQ(sigpending(&pending), 0);
  EXPECT_EQ(sigismember(&pending, SIGQUIT), 0);
  EXPECT_EQ(sigismember(&pending, SIGUSR1), 0);
}

}  // namespace
}  // namespace fsdp::comm
