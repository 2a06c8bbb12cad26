#include "comm/launcher/launcher_stop_request.h"

#include <signal.h>

#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

TEST(StopRequestTest, NotesTheFirstSignal) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const StopRequest stop;
    EXPECT_FALSE(stop.requested());
    raise(signal);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal(), signal);
  }
}

TEST(StopRequestDeathTest, TheSecondSignalEndsTheProcess) {
  for (const int second : {SIGINT, SIGTERM}) {
    EXPECT_EXIT(
        {
          const StopRequest stop;
          raise(SIGINT);
          raise(second);
        },
        ::testing::KilledBySignal(second), "");
  }
}

TEST(StopRequestTest, RestoresWhatWas) {
  signal(SIGTERM, SIG_IGN);
  {
    const StopRequest stop;
    raise(SIGTERM);
    EXPECT_FALSE(stop.requested());
    raise(SIGINT);
    EXPECT_EQ(stop.signal(), SIGINT);
  }
  EXPECT_EQ(signal(SIGTERM, SIG_DFL), SIG_IGN);
  EXPECT_EQ(signal(SIGINT, SIG_DFL), SIG_DFL);
}

}  // namespace
}  // namespace fsdp::comm
