#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/range_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

class PaceTest : public ::testing::Test {
 protected:
  PaceTest() {
    options_.bytes_per_second = 1000;
    options_.cancelled = &cancelled_;
    options_.now = [this] { return now_; };
    options_.sleep = [this](absl::Duration time) {
      now_ += time;
      if (now_ >= cancel_at_) cancelled_ = true;
    };
  }

  PaceOptions options_;
  std::atomic<bool> cancelled_{false};
  const absl::Time start_ = absl::FromUnixSeconds(1000);
  absl::Time now_ = start_;
  absl::Time cancel_at_ = absl::InfiniteFuture();
};

TEST_F(PaceTest, WaitsUntilWhatWasTakenIsPaidFor) {
  Pace pace(options_);
  EXPECT_OK(pace.Take(500));
  EXPECT_EQ(now_, start_);
  EXPECT_OK(pace.Take(2000));
  EXPECT_EQ(now_, start_ + absl::Milliseconds(500));
  EXPECT_OK(pace.Take(1));
  EXPECT_EQ(now_, start_ + absl::Milliseconds(2500));
  // Time that was not used is not saved up.
  now_ += absl::Seconds(100);
  EXPECT_OK(pace.Take(1000));
  EXPECT_OK(pace.Take(1000));
  EXPECT_EQ(now_, start_ + absl::Milliseconds(103500));
}

TEST_F(PaceTest, CancelledWhileItWaits) {
  Pace pace(options_);
  EXPECT_OK(pace.Take(1000000));
  cancel_at_ = start_ + absl::Seconds(1);
  EXPECT_THAT(pace.Take(1), StatusIs(absl::StatusCode::kCancelled,
                                     HasSubstr("it was cancelled")));
  EXPECT_LT(now_, start_ + absl::Seconds(2));
  EXPECT_FALSE(pace.CheckCancelled().ok());
}

TEST_F(PaceTest, NoLimit) {
  options_.bytes_per_second = 0;
  Pace pace(options_);
  for (int i = 0; i < 3; ++i) EXPECT_OK(pace.Take(int64_t{1} << 40));
  EXPECT_EQ(now_, start_);
}

}  // namespace
}  // namespace fsdp::checkpoint
