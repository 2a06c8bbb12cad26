#include "comm/quantized/quantized_communicator.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/quantized_group.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

absl::StatusOr<Group> ExactWhereSmall(int world_size, absl::Duration timeout) {
  FSDP_ASSIGN_OR_RETURN(Group group, CreateLocalGroup(world_size, {timeout}));
  QuantizationOptions options;
  options.min_bytes = 1 << 30;
  for (auto& comm : group) {
    FSDP_ASSIGN_OR_RETURN(
        comm, CreateQuantizedCommunicator(std::move(comm), options));
  }
  return group;
}

INSTANTIATE_TEST_SUITE_P(Small, CommunicatorContract,
                         ::testing::Values(ContractBackend{"quantised",
                                                           ExactWhereSmall}),
                         BackendName);

// Makes one call of each kind on two ranks.
absl::Status CallAll(Communicator& comm, at::ScalarType dtype) {
  constexpr int64_t kSize = 1024;
  const at::Tensor whole = at::full({2 * kSize}, 1, dtype);
  const at::Tensor part = at::full({kSize}, 1, dtype);
  FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(whole, part, "w")));
  FSDP_RETURN_IF_ERROR(
      Finish(comm.ReduceScatter(part, whole, ReduceOp::kSum, "w")));
  FSDP_RETURN_IF_ERROR(
      Finish(comm.ReduceScatter(part, whole, ReduceOp::kMax, "w")));
  if (whole.is_floating_point()) {
    FSDP_RETURN_IF_ERROR(
        Finish(comm.ReduceScatterScaled(part, whole, {}, "w")));
  }
  FSDP_RETURN_IF_ERROR(Finish(comm.AllReduce(whole, ReduceOp::kSum, "w")));
  return Finish(comm.Broadcast(whole, 0, "w"));
}

std::string Sent(const QuantizationOptions& options, at::ScalarType dtype) {
  CollectiveLog log;
  const Group group = QuantizedGroup(2, options, &log).value();
  EXPECT_OK(AllOk(RunRanks(
      group, [&](Communicator& comm) { return CallAll(comm, dtype); })));
  std::string sent;
  for (Collective collective :
       {Collective::kAllGather, Collective::kReduceScatter,
        Collective::kAllToAll, Collective::kAllReduce,
        Collective::kBroadcast}) {
    const CollectiveLog::Totals totals = log.TotalsOf(collective);
    absl::StrAppend(&sent, totals.count / 2, " x ",
                    totals.count == 0 ? 0 : totals.bytes / totals.count, "; ");
  }
  return sent;
}

// 1024 numbers are 1024 bytes and 4 scales, from each of two ranks.
TEST(QuantizedBytesTest, AreAByteForEachNumberAndTheScales) {
  EXPECT_EQ(Sent({}, at::kFloat),
            "1 x 2080; 1 x 8192; 2 x 2080; 1 x 8192; 1 x 8192; ");
  EXPECT_EQ(Sent({}, at::kBFloat16),
            "1 x 2080; 1 x 4096; 2 x 2080; 1 x 4096; 1 x 4096; ");
  // Flags travel as they are.
  QuantizationOptions options;
  options.exact_tail = 8;
  EXPECT_EQ(Sent(options, at::kFloat),
            "1 x 2080; 1 x 8192; 2 x 2144; 1 x 8192; 1 x 8192; ");
}

TEST(QuantizedBytesTest, NothingIsQuantisedThatIsNotAskedFor) {
  constexpr char kExact[] = "1 x 8192; 3 x 8192; 0 x 0; 1 x 8192; 1 x 8192; ";
  QuantizationOptions options;
  options.min_bytes = 8193;
  EXPECT_EQ(Sent(options, at::kFloat), kExact);
  options.min_bytes = 8192;
  options.gather = false;
  EXPECT_EQ(Sent(options, at::kFloat),
            "1 x 8192; 1 x 8192; 2 x 2080; 1 x 8192; 1 x 8192; ");
  options.reduce = false;
  EXPECT_EQ(Sent(options, at::kFloat), kExact);
  EXPECT_EQ(Sent({}, at::kInt),
            "1 x 8192; 2 x 8192; 0 x 0; 1 x 8192; 1 x 8192; ");
}

TEST(QuantizationLogTest, HoldsWhatWasLost) {
  QuantizationLog log;
  QuantizationOptions options;
  options.log = &log;
  EXPECT_OK(RunQuantized(2, options, [](Communicator& comm) -> absl::Status {
    const at::Tensor in = at::full({16}, 0.25);
    in[0] = 127;
    FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(at::zeros({32}), in, "a")));
    in[5] = std::numeric_limits<float>::infinity();
    FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(at::zeros({32}), in, "b")));
    return CallAll(comm, at::kFloat);
  }));
  const QuantizationLog::Totals gathers =
      log.TotalsOf(Collective::kAllGather, "a");
  EXPECT_EQ(gathers.count, 2);
  EXPECT_EQ(gathers.error.max_abs, 0.25);
  EXPECT_EQ(gathers.error.squared_error, 2 * 15 * 0.0625);
  const QuantizationLog::Totals all = log.TotalsOf(Collective::kAllGather);
  EXPECT_EQ(all.count, 6);
  EXPECT_EQ(all.error.max_abs, 0.25);
  EXPECT_EQ(all.error.not_finite, 2 * 16);
  const QuantizationLog::Totals sums = log.TotalsOf(Collective::kReduceScatter);
  EXPECT_EQ(sums.count, 4);
  EXPECT_LT(sums.error.relative_l2(), 1e-6);
  EXPECT_EQ(sums.error.not_finite, 0);
  log.Clear();
  EXPECT_EQ(log.TotalsOf(Collective::kAllGather).count, 0);
}

// Returns one rank of three that all pass the same.
std::unique_ptr<Communicator> QuantizedLoopback(c10::Device device) {
  LoopbackOptions options;
  options.place = {1, 3};
  options.device = device;
  return CreateQuantizedCommunicator(CreateLoopback(options).value(), {})
      .value();
}

struct Results {
  at::Tensor gathered;
  at::Tensor summed;
};

// Makes calls on the current stream and uses their results on `side`. Memory in
// between is freed and used again while `side` may still be reading it.
Results OnTwoStreams(c10::Device device, const at::Tensor& numbers) {
  const std::unique_ptr<Communicator> comm = QuantizedLoopback(device);
  const at::Tensor in = numbers.to(device);
  Results results = {
      at::zeros({3 * in.numel()}, in.options()),
      at::zeros({in.numel() / 3}, in.options().dtype(at::kFloat))};
  SideStream side(device);
  side.FollowCurrentStream();
  for (int repeat = 0; repeat < 3; ++repeat) {
    auto gather = comm->AllGather(results.gathered, in, "gather").value();
    auto sum = comm->ReduceScatterScaled(results.summed, in,
                                         {0.5, /*accumulate=*/true}, "sum")
                   .value();
    const SideStream::Scope scope(side);
    EXPECT_OK(gather->BlockCurrentStream());
    EXPECT_OK(sum->BlockCurrentStream());
  }
  side.BlockCurrentStream();
  return results;
}

TEST(QuantizedCommunicatorTest, StreamsWaitForWhatTheyNeedAndTheHostDoesNot) {
  FakeDevice::Register();
  const at::Tensor numbers = RandomNumbers(1, at::kBFloat16, int64_t{3} * 1021);
  const Results expected = OnTwoStreams(at::kCPU, numbers);
  FakeDevice::Reset();
  const Results actual = OnTwoStreams(FakeDevice::device(), numbers);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  // The only wait is the copy of `numbers` to the device.
  EXPECT_EQ(FakeDevice::HostWaits().size(), 1u);
  EXPECT_TRUE(SameBits(actual.gathered.cpu(), expected.gathered));
  EXPECT_TRUE(SameBits(actual.summed.cpu(), expected.summed));
}

// One rank of three on a fresh device, and what it gathers.
struct GatherOnDevice {
  std::unique_ptr<Communicator> comm;
  at::Tensor in;
  at::Tensor out;
};

GatherOnDevice DeviceGather() {
  FakeDevice::Register();
  FakeDevice::Reset();
  const at::TensorOptions options(FakeDevice::device());
  return {QuantizedLoopback(FakeDevice::device()), at::zeros({64}, options),
          at::zeros({192}, options)};
}

TEST(QuantizedCommunicatorTest, TheHostWaitsUntilTheDeviceIsDone) {
  const auto [comm, in, out] = DeviceGather();
  auto work = comm->AllGather(out, in, "w").value();
  EXPECT_OK(work->Wait(absl::Now() + absl::Seconds(30)));
  FakeDevice::HostRead(out, "the output");
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST(QuantizedCommunicatorTest, AMissedDeadlineEndsTheGroup) {
  const auto [comm, in, out] = DeviceGather();
  auto work = comm->AllGather(out, in, "w").value();
  EXPECT_OK(work->BlockCurrentStream());
  {
    const FakeDevice::Stall stall;
    EXPECT_THAT(work->Wait(absl::Now()),
                StatusIs(Code::kDeadlineExceeded,
                         HasSubstr("all-gather of w on rank 1 of 3")));
  }
  EXPECT_THAT(work->Wait(absl::InfiniteFuture()),
              StatusIs(Code::kDeadlineExceeded, HasSubstr("deadline")));
  EXPECT_THAT(
      comm->AllGather(out, in, "w").status(),
      StatusIs(Code::kAborted, HasSubstr("is not done at the deadline")));
}

// The output turns out too small, which only the last part notices.
TEST(QuantizedCommunicatorTest, WhatCannotBeFinishedEndsTheGroup) {
  const auto [comm, in, out] = DeviceGather();
  SideStream side(FakeDevice::device());
  {
    auto work = comm->AllGather(out, in, "w").value();
    out.unsafeGetTensorImpl()->set_sizes_contiguous({191});
    const SideStream::Scope scope(side);
    EXPECT_THAT(
        work->BlockCurrentStream(),
        StatusIs(Code::kInternal, HasSubstr("all-gather of w on rank 1 of 3")));
  }
  EXPECT_THAT(comm->AllGather(at::zeros({192}, in.options()), in, "w").status(),
              StatusIs(Code::kAborted, HasSubstr("aborted")));
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST(QuantizedCommunicatorTest, SubGroupsAreQuantised) {
  CollectiveLog log;
  ASSERT_OK_AND_ASSIGN(const Group group, QuantizedGroup(3, {}, &log));
  EXPECT_OK(AllOk(RunRanks(group, [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto part, comm.Split(comm.rank() / 2, 0));
    if (comm.rank() == 2) return absl::OkStatus();
    return CallAll(*part, at::kFloat);
  })));
  EXPECT_EQ(log.TotalsOf(Collective::kAllToAll).count, 4);
}

TEST(QuantizedCommunicatorTest, FailsAsItsBase) {
  ASSERT_OK_AND_ASSIGN(const Group group, QuantizedGroup(2, {}));
  ASSERT_OK_AND_ASSIGN(
      auto work, group[0]->AllGather(at::zeros({64}), at::zeros({32}), "w"));
  group[1]->Abort(absl::DataLossError("torn page"));
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_THAT(work->BlockCurrentStream(),
                StatusIs(Code::kAborted, HasSubstr("torn page")));
    EXPECT_THAT(work->Wait(absl::InfinitePast()),
                StatusIs(Code::kAborted, HasSubstr("torn page")));
  }
}

TEST(QuantizedCommunicatorTest, RefusesOptionsOutOfRange) {
  QuantizationOptions wrong[4];
  wrong[0].block = 0;
  wrong[1].min_bytes = -1;
  wrong[2].exact_tail = -1;
  wrong[3].block = (int64_t{1} << 30) + 1;
  for (const QuantizationOptions& options : wrong) {
    EXPECT_DEATH((void)QuantizedGroup(1, options), "options.block >= 1");
  }
}

}  // namespace
}  // namespace fsdp::comm::testing
