// Communicators that say that they can be captured, on the fake device, which
// refuses in a capture what CUDA refuses.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "base/device_graph.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/quantized/quantized_communicator.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/recording_communicator.h"
#include "comm/wrappers/paired_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FakeDevice;
using ::testing::IsEmpty;

constexpr int kRanks = 3;
constexpr int64_t kNumel = 6;

using Made = std::unique_ptr<Communicator>;

Made Loopback() {
  LoopbackOptions options;
  options.place = {/*rank=*/1, kRanks};
  options.device = FakeDevice::device();
  return CreateLoopback(options).value();
}

Made Recorded() {
  static CollectiveLog* const log = new CollectiveLog;
  return Record(Loopback(), log);
}

Made Quantized() {
  QuantizationOptions options;
  options.min_bytes = 0;
  return CreateQuantizedCommunicator(Loopback(), options).value();
}

Made Paired() {
  auto hosts = CreateLocalGroup(kRanks).value();
  return CreatePairedCommunicator(std::move(hosts[1]), Loopback()).value();
}

struct Kind {
  std::string name;
  std::function<Made()> make;
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) {
  return out << kind.name;
}

struct Tensors {
  const at::TensorOptions on =
      at::TensorOptions(at::kFloat).device(FakeDevice::device());
  const at::Tensor shard = at::arange(kNumel, on);
  const at::Tensor whole = at::full({kNumel * kRanks}, 0, on);
  const at::Tensor exchanged = at::full({kNumel * kRanks}, 0, on);
  const at::Tensor sum = at::full({kNumel}, 100, on);
  const at::Tensor norm = at::full({1}, 1, on);
};

absl::Status Order(StartedWork work) {
  FSDP_RETURN_IF_ERROR(work.status());
  return (*work)->BlockCurrentStream();
}

absl::Status Step(Communicator& comm, const Tensors& t) {
  FSDP_RETURN_IF_ERROR(Order(comm.AllGather(t.whole, t.shard, "unit")));
  t.whole.add_(1);
  FSDP_RETURN_IF_ERROR(Order(comm.AllToAll(t.exchanged, t.whole, "unit")));
  FSDP_RETURN_IF_ERROR(
      Order(comm.ReduceScatterScaled(t.sum, t.exchanged, {0.5, true}, "unit")));
  FSDP_RETURN_IF_ERROR(
      Order(comm.ReduceScatter(t.exchanged.narrow(0, kNumel, kNumel),
                               t.exchanged, ReduceOp::kSum, "unit")));
  FSDP_RETURN_IF_ERROR(Order(comm.Broadcast(t.sum, 0, "unit")));
  FSDP_RETURN_IF_ERROR(Order(comm.AllReduce(t.norm, ReduceOp::kSum, "norm")));
  t.shard.add_(t.exchanged.narrow(0, kNumel, kNumel), 0.125);
  return absl::OkStatus();
}

class CaptureTest : public ::testing::TestWithParam<Kind> {};

TEST_P(CaptureTest, ReplaysAreTheStepsThatTheyStandFor) {
  FakeDevice::Register();
  FakeDevice::Reset();
  const auto comm = GetParam().make();
  ASSERT_TRUE(comm->CanBeCaptured());
  const SideStream stream(FakeDevice::device());
  const SideStream::Scope on_stream(stream);
  const Tensors stepped;
  for (int i = 0; i < 3; ++i) ASSERT_OK(Step(*comm, stepped));

  const Tensors replayed;
  ASSERT_OK(Step(*comm, replayed));
  ASSERT_OK_AND_ASSIGN(const auto graph, ::fsdp::testing::FakeDeviceGraph::Make(
                                             FakeDevice::device()));
  ASSERT_OK(graph->BeginCapture());
  const absl::Status step = Step(*comm, replayed);
  ASSERT_OK(graph->EndCapture());
  ASSERT_OK(step);
  for (int i = 0; i < 2; ++i) ASSERT_OK(graph->Replay());
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());

  EXPECT_TRUE(replayed.shard.cpu().equal(stepped.shard.cpu()));
  EXPECT_TRUE(replayed.sum.cpu().equal(stepped.sum.cpu()));
  EXPECT_TRUE(replayed.norm.cpu().equal(stepped.norm.cpu()));
  EXPECT_EQ(replayed.norm.cpu().item<float>(), kRanks * kRanks * kRanks);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Of, CaptureTest,
                         ::testing::Values(Kind{"loopback", Loopback},
                                           Kind{"recorded", Recorded},
                                           Kind{"quantized", Quantized},
                                           Kind{"paired", Paired}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::comm
