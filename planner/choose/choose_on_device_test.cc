// Options that are chosen for a model on a device, which may use the memory of
// its host.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/captured_training.h"
#include "fsdp/testing/toy_model.h"
#include "gtest/gtest.h"
#include "planner/choose/choose_options.h"

namespace fsdp {
namespace {

using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::FakeDeviceWorld;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;

constexpr int64_t kDim = 128;

TEST(ChooseOnDeviceTest, WhatHasNoRoomRestsInTheHostsMemory) {
  FakeDevice::Register();
  ASSERT_OK_AND_ASSIGN(const auto ranks, FakeDeviceWorld(1));
  // Units, and so transfers, are small beside the model.
  const std::shared_ptr<NetImpl> net = MakeNet(kDim, /*num_blocks=*/24);
  FakeDevice::Move(net->parameters());
  AutoOptions wanted;
  wanted.memory_bytes = wanted.host_bytes = int64_t{1} << 30;
  wanted.rows = 8;
  wanted.loss = [&net](int64_t rows) {
    const at::Tensor x = Rows(0, rows, kDim).to(FakeDevice::device());
    return Loss(net->forward(x), x);
  };
  wanted.base = BlockUnits();
  ASSERT_OK_AND_ASSIGN(const AutoChoice rich,
                       ChooseOptions(net, ranks, wanted));
  int64_t least = wanted.memory_bytes;
  for (const Candidate& each : rich.considered) {
    EXPECT_EQ(each.rests, "memory");
    least = std::min(least, each.bytes());
  }
  wanted.memory_bytes = least - 1;
  ASSERT_OK_AND_ASSIGN(const AutoChoice poor,
                       ChooseOptions(net, ranks, wanted));
  EXPECT_EQ(poor.considered[poor.chosen].rests, "cpu") << poor.ToString();
  ASSERT_OK_AND_ASSIGN(const auto model, FullyShard(net, ranks, poor.options));
  EXPECT_EQ(model->PlanMemory().total(), poor.plan.total());
  EXPECT_TRUE(model->offload_stats().has_value());
}

}  // namespace
}  // namespace fsdp
