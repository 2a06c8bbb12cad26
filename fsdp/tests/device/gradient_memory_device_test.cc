// When the memory of dropped gradients is freed.
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "base/testing/fake_device.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/device_programs.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using Model = FullyShardedDataParallel<NetImpl>;

constexpr int64_t kDim = 6;

absl::StatusOr<Model> MakeModel(int world_size, c10::Device device) {
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> world,
                        OneOf(world_size, device));
  std::shared_ptr<NetImpl> net = MakeNet(kDim, /*num_blocks=*/3);
  if (!device.is_cpu()) FakeDevice::Move(net->parameters());
  // Shards and gradients are float, and so are the buffers that become
  // gradients on one rank.
  Options options = BlockUnits();
  options.unit.precision.param_dtype = at::kBFloat16;
  options.unit.precision.reduce_dtype = at::kFloat;
  return FullyShard(std::move(net), std::move(world), options);
}

// Tells whether a tensor's memory is still there, without keeping it.
using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;

std::vector<Memory> GradientsOf(const Model& model) {
  std::vector<Memory> memory;
  for (const TensorRange& named : model->Ranges()) {
    const at::Tensor& gradient = named.values.grad();
    if (!gradient.defined()) continue;
    memory.emplace_back(gradient.storage().getWeakStorageImpl());
  }
  return memory;
}

int NumHeld(const std::vector<Memory>& memory) {
  int held = 0;
  for (const Memory& each : memory) held += each.expired() ? 0 : 1;
  return held;
}

class GradientMemoryTest : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
  void SetUp() override { FakeDevice::Reset(); }
};

TEST_P(GradientMemoryTest, OfADeviceIsTheForwardsOnceTheyAreDropped) {
  ASSERT_OK_AND_ASSIGN(Model model,
                       MakeModel(GetParam(), FakeDevice::device()));
  FusedAdamW optimizer(model->Parameters(), {});
  const at::Tensor x = Rows(0, 3, kDim).to(FakeDevice::device());
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
    optimizer.step();
    const std::vector<Memory> memory = GradientsOf(model);
    ASSERT_FALSE(memory.empty());
    // The next backward adds to gradients that the user has not dropped.
    ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
    EXPECT_EQ(NumHeld(memory), memory.size());
    optimizer.zero_grad();
    const at::Tensor loss = Loss(model->forward(x), x);
    EXPECT_EQ(NumHeld(memory), 0) << i;
    ASSERT_OK(model->Backward(loss));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

// On the CPU, new memory would cost page faults.
TEST_P(GradientMemoryTest, OfTheCpuIsKeptForTheNextStep) {
  ASSERT_OK_AND_ASSIGN(Model model, MakeModel(GetParam(), at::kCPU));
  const at::Tensor x = Rows(0, 3, kDim);
  ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
  const std::vector<Memory> memory = GradientsOf(model);
  model->zero_grad();
  ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
  EXPECT_EQ(NumHeld(memory), memory.size());
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, GradientMemoryTest,
                         ::testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace fsdp::testing
