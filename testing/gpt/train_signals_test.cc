// Sends SIGQUIT and SIGUSR1 when ranks have not started, or have ended.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/gpt/testing/child_process.h"

namespace gpt {
namespace {

using testing::ChildProcess;
using ::testing::HasSubstr;

TEST(TrainSignalsTest, QuestionsEndNoLauncher) {
  ChildProcess train({"testing/gpt/testing/train_and_ask", "--ranks=2",
                      "--backend=gloo", "--data=count", "--layers=1",
                      "--dim=16", "--heads=2", "--seq=12", "--vocab=256",
                      "--batch=1", "--threads=1", "--steps=1", "--sample=0",
                      "--warmup=0"});
  EXPECT_EQ(train.Wait(), 0);
  EXPECT_THAT(train.output(),
              HasSubstr("[0] the launcher is ready for questions"));
  EXPECT_THAT(train.output(),
              HasSubstr("[1] the launcher is ready for questions"));
  EXPECT_THAT(train.output(), HasSubstr("\nthe launcher has survived\n"));
}

}  // namespace
}  // namespace gpt
