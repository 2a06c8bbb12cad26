#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "benchmarks/gpu_gpt.h"
#include "benchmarks/gpu_run.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "gtest/gtest.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {
namespace {

using ::fsdp::testing::FakeDevice;

// Matrices are large enough to be deferred.
constexpr gpt::GptConfig kConfig = {/*vocab=*/512, /*dim=*/128, /*layers=*/2,
                                    /*heads=*/2, /*seq=*/256};

std::shared_ptr<GpuGptImpl> Make(const Place& place, at::ScalarType dtype) {
  return MakeOn(place, dtype, [] {
    return std::make_shared<GpuGptImpl>(kConfig, /*checkpointing=*/false);
  });
}

TEST(GpuModuleTest, MatricesHaveNoMemoryBeforeTheyAreWanted) {
  const auto model = Make(Place(), at::kBFloat16);
  int deferred = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
    if (IsDeferred(parameter)) ++deferred;
  }
  EXPECT_EQ(deferred, 3 + 2 * 3);
}

TEST(GpuModuleTest, ADeviceOfWhichThisMachineHasNone) {
  Place place;
  place.device = c10::Device(c10::kCUDA, 0);
  const auto linear = MakeOn(place, at::kFloat, [] {
    return torch::nn::Linear(torch::nn::LinearOptions(256, 256).bias(false))
        .ptr();
  });
  EXPECT_EQ(linear->weight.device(), place.device);
  EXPECT_TRUE(IsDeferred(linear->weight));
}

TEST(GpuModuleTest, TwoHaveTheSameValuesAndTheyAreAsLayersDrawThem) {
  const auto one = Make(Place(), at::kFloat);
  const auto other = Make(Place(), at::kFloat);
  ASSERT_OK(Materialize(*one));
  ASSERT_OK(Materialize(*other));
  const auto values = one->named_parameters();
  for (const auto& named : other->named_parameters()) {
    EXPECT_TRUE(at::equal(values[named.key()], named.value())) << named.key();
  }
  // Values are uniform below 1 / sqrt(inputs); the deviation is that over
  // sqrt(3).
  const at::Tensor& linear = values["blocks.1.fc.weight"];
  EXPECT_LE(linear.abs().max().item<double>(), 1 / std::sqrt(128.0));
  EXPECT_NEAR(linear.std().item<double>(), 1 / std::sqrt(3 * 128.0), 1e-3);
  EXPECT_NEAR(values["wte.weight"].std().item<double>(), 1, 0.02);
  EXPECT_TRUE(at::equal(values["ln.weight"], at::ones({128})));
  EXPECT_FALSE(
      at::equal(values["blocks.0.fc.weight"], values["blocks.1.fc.weight"]));
}

TEST(GpuModuleTest, TheDeviceItselfDraws) {
  FakeDevice::Register();
  Place place;
  place.device = FakeDevice::device();
  FakeDevice::Reset();
  const auto model = Make(place, at::kFloat);
  ASSERT_OK(Materialize(*model));
  EXPECT_EQ(FakeDevice::HostWaits(), std::vector<std::string>());
  const auto values = Make(Place(), at::kFloat);
  ASSERT_OK(Materialize(*values));
  // Random numbers are the CPU's.
  const auto expected = values->named_parameters();
  for (const auto& named : model->named_parameters()) {
    EXPECT_EQ(named.value().device(), place.device);
    EXPECT_TRUE(named.value().requires_grad());
    EXPECT_TRUE(at::equal(named.value().cpu(), expected[named.key()]))
        << named.key();
  }
}

}  // namespace
}  // namespace fsdp::benchmarks
