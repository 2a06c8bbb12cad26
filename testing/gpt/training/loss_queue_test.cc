#include "testing/gpt/training/loss_queue.h"

#include <ATen/ops/full.h>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

at::Tensor Loss(double value, c10::Device device) {
  return at::full({}, value, at::TensorOptions(at::kFloat).device(device));
}

class LossQueueTest : public ::testing::Test {
 protected:
  LossQueueTest() {
    FakeDevice::Register();
    FakeDevice::Reset();
  }
};

TEST_F(LossQueueTest, GivesLossesInOrderWithoutASynchronisation) {
  for (const c10::Device device :
       {c10::Device(at::kCPU), FakeDevice::device()}) {
    LossQueue losses;
    for (const double value : {2.5, 1.25, 0.5}) {
      at::Tensor loss = Loss(value, device);
      losses.Push(loss);
      loss.zero_();  // it has been copied
    }
    EXPECT_EQ(losses.size(), 3u);
    for (const double value : {2.5, 1.25, 0.5}) {
      ASSERT_OK_AND_ASSIGN(const double popped, losses.Pop(Soon()));
      EXPECT_EQ(popped, value);
    }
    EXPECT_EQ(losses.size(), 0u);
  }
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(LossQueueTest, ADeviceThatDoesNotComputeItIsGivenUp) {
  LossQueue losses;
  losses.Push(Loss(1, FakeDevice::device()));
  const FakeDevice::Stall stall;
  EXPECT_THAT(losses.Pop(absl::Now() + absl::Milliseconds(3)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("has not computed it")));
}

}  // namespace
}  // namespace gpt
