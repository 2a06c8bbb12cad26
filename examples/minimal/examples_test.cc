// Runs the examples as a user does. They are this test's runfiles, below the
// directory that it starts in.
#include <signal.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"

namespace fsdp {
namespace {

using ::fsdp::testing::ChildProcess;
using ::testing::HasSubstr;

std::string Command(const std::string& example) {
  return "env OMP_NUM_THREADS=1 examples/minimal/" + example;
}

// Returns the loss that `output` has for `step`.
double LossAt(const std::string& step, const std::string& output) {
  const std::string before = absl::StrCat("step ", step);
  const size_t found = output.find(before);
  if (found == std::string::npos) return -1;
  const size_t begin = output.find_last_of(' ', output.find('\n', found));
  return std::strtod(output.c_str() + begin, nullptr);
}

TEST(ExamplesTest, MinimalLearns) {
  ChildProcess minimal(Command("minimal"));
  ASSERT_EQ(minimal.Wait(), 0) << minimal.output();
  const double first = LossAt("0 ", minimal.output());
  EXPECT_GT(first, 10);
  EXPECT_LT(LossAt("80 ", minimal.output()), first / 2);
  EXPECT_GE(LossAt("80 ", minimal.output()), 0);
}

TEST(ExamplesTest, ResumableGoesOnWhereItWasStopped) {
  const std::string folder = ::testing::TempDir();
  ChildProcess unbroken(Command("resumable " + folder + "/unbroken"));
  ASSERT_EQ(unbroken.Wait(), 0) << unbroken.output();
  const std::string command = Command("resumable " + folder + "/stopped");
  ChildProcess stopped(command);
  ASSERT_TRUE(stopped.ReadUntil("step 300 ")) << stopped.output();
  stopped.Signal(SIGTERM);
  ASSERT_EQ(stopped.Wait(), 128 + SIGTERM) << stopped.output();
  ChildProcess resumed(command);
  ASSERT_EQ(resumed.Wait(), 0) << resumed.output();
  EXPECT_EQ(LossAt("100 ", resumed.output()), -1) << "it began anew";
  for (const char* step : {"900 ", "1000 "}) {
    EXPECT_EQ(LossAt(step, resumed.output()), LossAt(step, unbroken.output()));
    EXPECT_GT(LossAt(step, unbroken.output()), 0);
  }
  ChildProcess relative(Command("resumable run"));
  EXPECT_EQ(relative.Wait(), 1);
  EXPECT_THAT(relative.output(), HasSubstr("/ABSOLUTE/PATH"));
}

TEST(ExamplesTest, ReplicasEndTogether) {
  ChildProcess replicas(Command("replicas"));
  ASSERT_EQ(replicas.Wait(), 0) << replicas.output();
  EXPECT_THAT(replicas.output(), HasSubstr("step 1000 by replicas"));
}

}  // namespace
}  // namespace fsdp
