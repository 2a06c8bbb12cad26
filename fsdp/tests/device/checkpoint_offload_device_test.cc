// Models on a device with streams whose checkpointed regions offload what they
// keep, as one of N ranks: values equal those on the CPU, streams leave nothing
// unordered, and the host does not wait.
#include <ATen/ops/tanh.h>

#include <ostream>

#include "base/testing/fake_device.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/device_programs.h"
#include "fsdp/testing/layered_net.h"
#include "fsdp/testing/sharded_test.h"
#include "offload/param_store.h"
#include "offload/testing/kept_file.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::testing::TemporaryFile;
using Offload = std::shared_ptr<ActivationOffload>;
using Values = std::map<std::string, at::Tensor>;

constexpr int64_t kRows = 3;
constexpr int kSteps = 3;

template <typename Fn, typename... More>
at::Tensor Region(const Offload& offload, Fn fn, const at::Tensor& x,
                  const More&... more) {
  CheckpointOptions options;
  options.offload = offload;
  return CheckpointWith(options, std::move(fn), x, more...);
}

struct Program {
  std::string name;
  LayerBody (*layer)(const Offload&);
  NetBody (*net)(const Offload&);
};
void PrintTo(const Program& program, std::ostream* out) {
  *out << program.name;
}

LayerBody Whole(const Offload& /*offload*/) { return WholeLayer; }

LayerBody InRegions(const Offload& offload) {
  return [offload](Layer& layer, const at::Tensor& x) {
    at::Tensor y = Region(
        offload, [&](const at::Tensor& x) { return layer.fc->forward(x); }, x);
    y = Region(
        offload, [](const at::Tensor& y) { return at::tanh(y); }, y);
    return x + Region(
                   offload,
                   [&](const at::Tensor& y) { return layer.out->forward(y); },
                   y);
  };
}

NetBody EachLayer(const Offload& /*offload*/) {
  return [](Net& net, const at::Tensor& x) {
    at::Tensor y = net.embed->forward(x);
    for (const auto& layer : net.layers) y = Forward(layer, y);
    return y;
  };
}

// The regions share one argument.
NetBody RegionsAround(const Offload& offload) {
  return [offload](Net& net, const at::Tensor& x) {
    at::Tensor y = net.embed->forward(x);
    const at::Tensor shared = at::tanh(y);
    for (const auto& layer : net.layers) {
      y = Region(
          offload,
          [&](const at::Tensor& y, const at::Tensor& shared) {
            return Forward(layer, y) * shared;
          },
          y, shared);
    }
    return y;
  };
}

std::vector<Program> Programs() {
  return {{"Around", Whole, RegionsAround},
          {"Inside", InRegions, EachLayer},
          {"AroundAndInside", InRegions, RegionsAround}};
}

absl::StatusOr<Offload> InHostMemory(c10::Device device) {
  return ActivationOffload::MakeInHostMemory(16 * offload::kPageBytes, device,
                                             SmallOptions());
}

absl::StatusOr<Offload> WithoutWindow(c10::Device device) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = 0;
  return ActivationOffload::MakeInHostMemory(16 * offload::kPageBytes, device,
                                             options);
}

absl::StatusOr<Offload> InAFile(c10::Device /*device*/) {
  return ActivationOffload::Make(TemporaryFile(64 * offload::kPageBytes),
                                 SmallOptions());
}

using MakeOffload = absl::StatusOr<Offload> (*)(c10::Device);

// Returns the shards after some steps on `device`. Sets `waits` to the device's
// reports on all steps but the first.
absl::StatusOr<Values> Train(const Program& program, const Offload& offload,
                             c10::Device device, int world_size,
                             std::vector<std::string>& waits) {
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> world,
                        OneOf(world_size, device));
  auto net =
      std::make_shared<Net>(program.layer(offload), program.net(offload));
  FillParameters(*net, 1);
  if (!device.is_cpu()) FakeDevice::Move(net->parameters());
  Options options = UnitsOf<Layer>();
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, world, options));
  FusedAdamW optimizer(model->Parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<at::Tensor> batches;
  batches.reserve(kSteps);
  for (int64_t i = 0; i < kSteps; ++i) {
    batches.push_back(Rows(3 * i, kRows, Layer::kDim).to(device));
  }
  for (int i = 0; i < kSteps; ++i) {
    if (i == 1 && !device.is_cpu()) FakeDevice::Reset();
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(batches[i]).square().mean()));
    optimizer.step();
    optimizer.zero_grad();
  }
  if (!device.is_cpu()) waits = FakeDevice::HostWaits();
  Values values;
  for (const TensorRange& named : model->Ranges()) {
    values[named.name] = named.values.detach().cpu().clone();
  }
  return values;
}

class CheckpointOffloadDeviceTest
    : public ::testing::TestWithParam<std::tuple<Program, MakeOffload, int>> {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_P(CheckpointOffloadDeviceTest, TrainsAsTheCpuDoesAndTheHostDoesNotWait) {
  const auto& [program, make_offload, world_size] = GetParam();
  const c10::Device device = FakeDevice::device();
  std::vector<std::string> waits;
  const auto expected = Train(program, nullptr, at::kCPU, world_size, waits);
  ASSERT_OK(expected.status());
  FakeDevice::Reset();
  ASSERT_OK_AND_ASSIGN(const Offload offload, make_offload(device));
  const auto actual = Train(program, offload, device, world_size, waits);
  ASSERT_OK(actual.status());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  EXPECT_THAT(waits, IsEmpty());
  const ActivationOffloadStats stats = offload->stats();
  EXPECT_GE(stats.found + stats.prefetched + stats.missed, kSteps);
  // A file may be slower than the step, which then finds what is not written
  // yet.
  if (make_offload != &InAFile) {
    EXPECT_GE(stats.tensors_out, kSteps);
  }
  EXPECT_EQ(stats.failed, 0);
  for (const auto& [name, value] : *expected) {
    // The last bits of a matrix product depend on where its factors lie.
    EXPECT_TRUE(at::allclose(actual->at(name), value, 1e-5, 1e-7)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointOffloadDeviceTest,
                         ::testing::Combine(::testing::ValuesIn(Programs()),
                                            ::testing::Values(&InHostMemory,
                                                              &WithoutWindow,
                                                              &InAFile),
                                            ::testing::Values(1, 2, 3)),
                         [](const auto& info) {
                           const MakeOffload make = std::get<1>(info.param);
                           return absl::StrCat(
                               std::get<0>(info.param).name,
                               make == &InHostMemory    ? "InHostMemory"
                               : make == &WithoutWindow ? "WithoutWindow"
                                                        : "InAFile",
                               "Of", std::get<2>(info.param));
                         });

}  // namespace
}  // namespace fsdp::testing
