#include <signal.h>

#include "comm/launcher/launcher_stop_request.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

int asked = 0;

TEST(LaunchSignalsTest, QuestionsDoNotEndTheProcess) {
  IgnoreQuestions();
  raise(SIGQUIT);
  raise(SIGUSR1);
  signal(SIGQUIT, SIG_DFL);
  signal(SIGUSR1, SIG_DFL);
}

TEST(LaunchSignalsTest, HandlersStay) {
  signal(SIGQUIT, [](int /*signal*/) { ++asked; });
  struct sigaction action = {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int, siginfo_t*, void*) { ++asked; };
  sigaction(SIGUSR1, &action, nullptr);
  IgnoreQuestions();
  raise(SIGQUIT);
  raise(SIGUSR1);
  EXPECT_EQ(asked, 2);
  signal(SIGQUIT, SIG_DFL);
  signal(SIGUSR1, SIG_DFL);
}

}  // namespace
}  // namespace fsdp::comm
