#include <ATen/ATen.h>

#include "base/tensor_over.h"
#include "base/testing/fake_device.h"
#include "flat_param/guarded_storage.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::flat_param {
namespace {

using ::fsdp::testing::FakeDevice;
using ::testing::IsEmpty;

constexpr int64_t kNumel = 12;

class GuardedStorageOnADevice : public ::testing::Test {
 protected:
  GuardedStorageOnADevice() {
    FakeDevice::Register();
    FakeDevice::Reset();
  }
};

TEST_F(GuardedStorageOnADevice, FillsEmptiesAndStaysArmed) {
  GuardedStorage guarded(kNumel * sizeof(float), FakeDevice::device(),
                         "not gathered");
  const at::Tensor parameter =
      TensorOver(guarded.storage(), 0, {4, 3}, {3, 1}, at::kFloat);
  const at::Tensor view = parameter.t();  // looks at no memory
  EXPECT_THROW(parameter.add(1), c10::Error);
  EXPECT_THROW(parameter.fill_(1), c10::Error);
  EXPECT_THROW(parameter.cpu(), c10::Error);

  const at::Tensor arena = at::ones({kNumel}, FakeDevice::device());
  guarded.Fill(arena.data_ptr());
  EXPECT_EQ(view.add(1).cpu().sum().item<float>(), 2 * kNumel);
  parameter.mul_(3);
  EXPECT_EQ(arena.cpu().sum().item<float>(), 3 * kNumel);

  guarded.Empty();
  EXPECT_THROW(view.sum(), c10::Error);
  EXPECT_EQ(view.sizes(), at::IntArrayRef({3, 4}));
}

TEST_F(GuardedStorageOnADevice, KeepsSavedTensorsValidOverARefill) {
  GuardedStorage guarded(kNumel * sizeof(float), FakeDevice::device(),
                         "not gathered");
  const at::Tensor first = at::full({kNumel}, 2.0, FakeDevice::device());
  const at::Tensor second = at::full({kNumel}, 2.0, FakeDevice::device());
  guarded.Fill(first.data_ptr());
  at::Tensor parameter =
      TensorOver(guarded.storage(), 0, {4, 3}, {3, 1}, at::kFloat);
  parameter.requires_grad_();
  const at::Tensor loss = parameter.mul(parameter).sum();
  guarded.Empty();
  guarded.Fill(second.data_ptr());
  loss.backward();
  EXPECT_TRUE(parameter.grad().cpu().eq(4).all().item<bool>());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

}  // namespace
}  // namespace fsdp::flat_param
