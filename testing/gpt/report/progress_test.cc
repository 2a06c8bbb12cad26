#include "testing/gpt/report/progress.h"

#include <optional>
#include <sstream>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

Progress::Options MakeOptions(std::optional<int> columns) {
  return {columns, /*num_steps=*/100, /*tokens_per_step=*/50,
          absl::Seconds(10)};
}

absl::Time At(int seconds) {
  return absl::UnixEpoch() + absl::Seconds(seconds);
}

TEST(ProgressTest, PrintsALineNowAndThenElsewhere) {
  std::ostringstream out;
  Progress progress(MakeOptions(std::nullopt), &out);
  progress.Update(1, 5.5, At(0));
  progress.Update(6, 5.0, At(5));
  progress.Update(11, 4.5, At(10));
  progress.Update(100, 1.25, At(99));
  progress.Finish();
  EXPECT_EQ(out.str(),
            "step 1/100  loss 5.500\n"
            "step 11/100  loss 4.500  50 tokens/s  ETA 1:29\n"
            "step 100/100  loss 1.250  50 tokens/s\n");
}

TEST(ProgressTest, RewritesOneLineOnATerminal) {
  std::ostringstream out;
  Progress progress(MakeOptions(/*columns=*/80), &out);
  progress.Update(1, 5.5, At(0));
  progress.Update(3, 2, At(20000));
  progress.Update(100, 1, At(20010));
  progress.Finish();
  progress.Finish();
  EXPECT_EQ(out.str(),
            "\rstep 1/100  loss 5.500"
            "\rstep 3/100  loss 2.000  0 tokens/s  ETA 269:26:40"
            "\rstep 100/100  loss 1.000  0 tokens/s             \n");
}

TEST(ProgressTest, NeverWraps) {
  std::ostringstream out;
  Progress progress(MakeOptions(/*columns=*/10), &out);
  progress.Update(1, 5.5, At(0));
  EXPECT_EQ(out.str(), "\rstep 1/10");
}

}  // namespace
}  // namespace gpt
