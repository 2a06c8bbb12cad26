// Steps on a device with streams, as one of N ranks: the values of the same
// steps on the CPU, nothing that streams leave unordered, no wait of the host.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/loopback_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/fused_optimizer.h"
#include "fsdp/offload_options.h"
#include "fsdp/resting_memory.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/host_store.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Model = FullyShardedDataParallel<NetImpl>;
using Values = std::map<std::string, at::Tensor>;

constexpr int64_t kDim = 6;
constexpr int kBlocks = 3;
constexpr int kSteps = 3;

struct Program {
  std::string name;
  std::function<void(Options&)> configure = [](Options&) {};
  // Of one step, instead of one forward and backward.
  std::function<absl::Status(Model&, const std::function<at::Tensor()>& loss)>
      step = [](Model& model, const std::function<at::Tensor()>& loss) {
        return model->Backward(loss());
      };
  bool clips = false;
  // Of values, where a last bit may become a step of int8.
  double tolerance = 0;
  bool steps_in_backward = false;
};

void PrintTo(const Program& program, std::ostream* out) {
  *out << program.name;
}

Program With(std::string name, std::function<void(Options&)> configure) {
  Program program;
  program.name = std::move(name);
  program.configure = std::move(configure);
  return program;
}

void AllInStores(Options& options) {
  OffloadOptions& offload = options.offload;
  offload.parameters = offload.gradients = offload.optimizer = Tier::kSsd;
  offload.make_store = [](RestingKind /*kind*/, int64_t capacity)
      -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
    return offload::HostStore::Make(capacity, offload::PageAllocator::System(),
                                    /*rollback=*/true);
  };
}

std::vector<Program> Programs() {
  std::vector<Program> programs;
  programs.push_back(With("FullShard", [](Options&) {}));
  programs.push_back(
      With("OneUnit", [](Options& options) { options.wrap_policy = nullptr; }));
  programs.push_back(With("ShardGradOp", [](Options& options) {
    options.unit.strategy = ShardingStrategy::kShardGradOp;
  }));
  programs.push_back(With("NoShard", [](Options& options) {
    options.unit.strategy = ShardingStrategy::kNoShard;
  }));
  programs.push_back(With("BFloat16", [](Options& options) {
    options.unit.precision.param_dtype = at::kBFloat16;
  }));
  programs.push_back(With("BFloat16ReducedInFloat", [](Options& options) {
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.reduce_dtype = at::kFloat;
  }));
  for (const bool gather : {false, true}) {
    programs.push_back(With(gather ? "QuantizedGathers" : "QuantizedSums",
                            [gather](Options& options) {
                              options.quantize.gather = gather;
                              options.quantize.reduce = !gather;
                              options.quantize.block = 8;
                            }));
    programs.back().tolerance = 1e-2;
  }
  programs.push_back(With("QuantizedInBFloat16", [](Options& options) {
    options.quantize.gather = options.quantize.reduce = true;
    options.unit.precision.param_dtype = at::kBFloat16;
    options.unit.precision.reduce_dtype = at::kFloat;
  }));
  programs.back().tolerance = 1e-2;
  programs.push_back(With("WithoutPrefetch", [](Options& options) {
    options.forward_prefetch = options.backward_prefetch = false;
  }));
  programs.push_back(With("AllOnTheCpu", [](Options& options) {
    OffloadOptions& offload = options.offload;
    offload.parameters = offload.gradients = offload.optimizer = Tier::kCpu;
  }));
  programs.push_back(With("AllOnTheCpuSteppedThere", [](Options& options) {
    OffloadOptions& offload = options.offload;
    offload.parameters = offload.gradients = offload.optimizer = Tier::kCpu;
    offload.step_on = StepOn::kHost;
  }));
  programs.push_back(
      With("AllOnTheCpuSteppedWhereFaster", [](Options& options) {
        OffloadOptions& offload = options.offload;
        offload.parameters = offload.gradients = offload.optimizer = Tier::kCpu;
        offload.step_on = StepOn::kFaster;
      }));
  programs.push_back(With("AllInStoresSteppedOnTheCpu", [](Options& options) {
    AllInStores(options);
    options.offload.step_on = StepOn::kHost;
  }));
  programs.push_back(With("GradientsOnTheDevice", [](Options& options) {
    OffloadOptions& offload = options.offload;
    offload.parameters = offload.optimizer = Tier::kCpu;
  }));
  programs.push_back(With("StatesOnTheCpu", [](Options& options) {
    options.offload.optimizer = Tier::kCpu;
  }));
  programs.push_back(With("AllInStores", AllInStores));
  programs.emplace_back();
  programs.back().name = "Clipped";
  programs.back().clips = true;
  programs.emplace_back();
  programs.back().name = "StepInBackward";
  programs.back().steps_in_backward = true;
  programs.emplace_back();
  programs.back().name = "Accumulated";
  programs.back().step = [](Model& model, const auto& loss) {
    FSDP_RETURN_IF_ERROR(model->Backward(loss()));
    return model->Backward(loss());
  };
  programs.emplace_back();
  programs.back().name = "NoSync";
  programs.back().step = [](Model& model, const auto& loss) {
    {
      const auto no_sync = model->NoSync();
      FSDP_RETURN_IF_ERROR(model->Backward(loss()));
    }
    return model->Backward(loss());
  };
  return programs;
}

// The shards after some steps on `device`; what the device has to say of all
// but the first step goes to `waits`.
absl::StatusOr<Values> Train(const Program& program, c10::Device device,
                             int world_size, std::vector<std::string>& waits) {
  comm::LoopbackOptions loopback;
  loopback.place = {world_size / 2, world_size};
  loopback.device = device;
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> world,
                        comm::CreateLoopback(loopback));
  const std::shared_ptr<NetImpl> net = MakeNet(kDim, kBlocks);
  if (!device.is_cpu()) FakeDevice::Move(net->parameters());
  Options options = BlockUnits();
  program.configure(options);
  FSDP_ASSIGN_OR_RETURN(Model model, FullyShard(net, world, options));
  FusedAdamW optimizer(model->Parameters(), torch::optim::AdamWOptions(1e-2));
  if (program.steps_in_backward) {
    FSDP_RETURN_IF_ERROR(
        model->StepInBackward([&](absl::Span<const NamedShard> unit) {
          return optimizer.StepUnit(unit);
        }));
  }
  std::vector<at::Tensor> batches;
  for (int i = 0; i < kSteps; ++i) {
    batches.push_back(Rows(3 * i, 3, kDim).to(device));
  }
  for (int i = 0; i < kSteps; ++i) {
    if (i == 1 && !device.is_cpu()) FakeDevice::Reset();
    const at::Tensor& x = batches[i];
    FSDP_RETURN_IF_ERROR(
        program.step(model, [&] { return Loss(model->forward(x), x); }));
    if (program.clips) {
      FSDP_RETURN_IF_ERROR(model->ClipGradNorm(/*max_norm=*/0.1).status());
    }
    if (!program.steps_in_backward) optimizer.step();
    optimizer.zero_grad();
  }
  if (!device.is_cpu()) waits = FakeDevice::HostWaits();
  Values values;
  for (const NamedShard& named : model->NamedShards()) {
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(named.shard, Use::kRead));
    values[named.name] = named.shard.detach().cpu().clone();
  }
  return values;
}

class DeviceTrainingTest
    : public ::testing::TestWithParam<std::tuple<Program, int>> {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_P(DeviceTrainingTest, StreamsAreOrderedAndTheHostWaitsForNothing) {
  const auto& [program, world_size] = GetParam();
  std::vector<std::string> waits;
  const absl::StatusOr<Values> expected =
      Train(program, at::kCPU, world_size, waits);
  ASSERT_OK(expected.status());
  FakeDevice::Reset();
  const absl::StatusOr<Values> actual =
      Train(program, FakeDevice::device(), world_size, waits);
  ASSERT_OK(actual.status());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  EXPECT_THAT(waits, IsEmpty());
  for (const auto& [name, value] : *expected) {
    // The last bits of a matrix product depend on where its factors lie.
    EXPECT_TRUE(
        at::allclose(actual->at(name), value, 1e-5, 1e-7 + program.tolerance))
        << name << ": " << actual->at(name) - value;
  }
}

absl::StatusOr<std::string> DescribeOffloaded(const OffloadOptions& offload) {
  comm::LoopbackOptions loopback;
  loopback.device = FakeDevice::device();
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> world,
                        comm::CreateLoopback(loopback));
  const std::shared_ptr<NetImpl> net = MakeNet(kDim, kBlocks);
  FakeDevice::Move(net->parameters());
  Options options = BlockUnits();
  options.offload = offload;
  FSDP_ASSIGN_OR_RETURN(const Model model, FullyShard(net, world, options));
  return model->Describe();
}

TEST(OffloadedDeviceTest, TellsWhetherItsMemoryIsLockedAndWhatSteps) {
  FakeDevice::Register();
  OffloadOptions offload;
  offload.optimizer = Tier::kCpu;
  offload.step_on = StepOn::kFaster;
  absl::StatusOr<std::string> text = DescribeOffloaded(offload);
  ASSERT_OK(text.status());
  EXPECT_THAT(*text, HasSubstr("memory for copies of privateuseone:0: locked"));
  EXPECT_THAT(*text, ContainsRegex("stepped by the (host|device): up .* GB/s"));
  offload.lock_pages = false;
  offload.step_on = StepOn::kDevice;
  text = DescribeOffloaded(offload);
  ASSERT_OK(text.status());
  EXPECT_THAT(*text, HasSubstr(": not locked, the host waits for copies"));
  EXPECT_THAT(*text, Not(HasSubstr("stepped by")));
}

INSTANTIATE_TEST_SUITE_P(All, DeviceTrainingTest,
                         ::testing::Combine(::testing::ValuesIn(Programs()),
                                            ::testing::Values(1, 2, 3, 5)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).name,
                                               "Of", std::get<1>(info.param));
                         });

}  // namespace
}  // namespace fsdp
