#include <signal.h>

#include "absl/time/time.h"
#include "comm/launcher/launch_options.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

TEST(StopRequestTest, NotesTheFirstSignal) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    const StopRequest stop;
    EXPECT_EQ(StopRequest::Current(), &stop);
    EXPECT_FALSE(stop.requested());
    raise(signal);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal(), signal);
  }
  EXPECT_EQ(StopRequest::Current(), nullptr);
}

TEST(StopRequestDeathTest, TheSecondSignalEndsTheProcess) {
  for (const int second : {SIGINT, SIGTERM}) {
    EXPECT_EXIT(
        {
          const StopRequest stop(absl::Minutes(2),
                                 /*apart=*/absl::ZeroDuration());
          raise(SIGINT);
          raise(second);
        },
        ::testing::KilledBySignal(second), "");
  }
}

// A terminal's or scheduler's signal comes to a rank directly and by way of its
// launcher.
TEST(StopRequestTest, TheSameSignalTwiceAtOnceIsOne) {
  const StopRequest stop(absl::Minutes(2), /*apart=*/absl::Hours(1));
  raise(SIGTERM);
  raise(SIGTERM);
  raise(SIGINT);
  EXPECT_EQ(stop.signal(), SIGTERM);
}

// Schedulers send SIGUSR1 some time before the SIGTERM that ends the job.
TEST(StopRequestTest, SigtermMayFollowSigusr1) {
  const StopRequest stop(absl::Minutes(2), /*apart=*/absl::ZeroDuration());
  raise(SIGUSR1);
  raise(SIGUSR1);
  raise(SIGTERM);
  EXPECT_EQ(stop.signal(), SIGUSR1);
}

TEST(StopRequestTest, RestoresWhatWas) {
  signal(SIGTERM, SIG_IGN);
  signal(SIGUSR1, SIG_IGN);
  {
    const StopRequest stop;
    raise(SIGTERM);
    EXPECT_FALSE(stop.requested());
    raise(SIGUSR1);
    EXPECT_EQ(stop.signal(), SIGUSR1);
  }
  EXPECT_EQ(signal(SIGTERM, SIG_DFL), SIG_IGN);
  EXPECT_EQ(signal(SIGUSR1, SIG_DFL), SIG_IGN);
  EXPECT_EQ(signal(SIGINT, SIG_DFL), SIG_DFL);
}

int asked = 0;

TEST(IgnoreQuestionsTest, QuestionsDoNotEndTheProcess) {
  IgnoreQuestions();
  raise(SIGQUIT);
  raise(SIGUSR1);
  signal(SIGQUIT, SIG_DFL);
  signal(SIGUSR1, SIG_DFL);
}

TEST(IgnoreQuestionsTest, HandlersStay) {
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
