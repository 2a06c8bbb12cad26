#include "comm/quantized/quantized_communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/call.h"
#include "comm/local/local_communicator.h"
#include "comm/local/loopback_communicator.h"
#include "comm/quantized/quantized_message.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/run_ranks.h"
#include "comm/wrappers/recording_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr int kWorldSizes[] = {1, 2, 3, 5};
constexpr int64_t kSizes[] = {0, 1, 7, 8, 257, 1021, 10'007};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,
                                      at::kBFloat16};

absl::StatusOr<Group> QuantizedGroup(int world_size,
                                     const QuantizationOptions& options,
                                     CollectiveLog* log = nullptr) {
  FSDP_ASSIGN_OR_RETURN(Group group, CreateLocalGroup(world_size));
  for (auto& comm : group) {
    if (log != nullptr) comm = Record(std::move(comm), log);
    FSDP_ASSIGN_OR_RETURN(
        comm, CreateQuantizedCommunicator(std::move(comm), options));
  }
  return group;
}

absl::Status RunQuantized(
    int world_size, const QuantizationOptions& options,
    const std::function<absl::Status(Communicator&)>& run) {
  FSDP_ASSIGN_OR_RETURN(const Group group, QuantizedGroup(world_size, options));
  return AllOk(RunRanks(group, run));
}

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

at::Tensor RandomNumbers(int seed, at::ScalarType dtype, int64_t size) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const at::Tensor numbers = at::empty({size}, at::kDouble);
  double* const data = numbers.mutable_data_ptr<double>();
  for (int64_t i = 0; i < size; ++i) data[i] = normal(random);
  return numbers.to(dtype);
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 ||
          std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

// What the others get to see of `numbers`, of which the last `exact` are.
at::Tensor Seen(const at::Tensor& numbers, int64_t exact, int64_t block) {
  const MessageLayout layout(numbers.numel(), exact, block,
                             numbers.scalar_type());
  if (layout.quantized() == 0) return numbers;
  const at::Tensor message = at::empty({layout.bytes()}, at::kByte);
  const at::Tensor seen = at::empty(numbers.sizes(), numbers.options());
  WriteMessages(layout, numbers, message);
  ReadMessages(layout, message, seen);
  return seen;
}

double Rounding(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 1.0 / 256
         : dtype == at::kHalf   ? 1.0 / 2048
                                : 1e-6;
}

// Half a step of the block's scale, and the rounding of what it becomes.
double Tolerance(const at::Tensor& numbers, int64_t i, int64_t block) {
  const int64_t begin = i / block * block;
  const int64_t size = std::min(block, numbers.numel() - begin);
  const double largest =
      numbers.narrow(0, begin, size).abs().max().item<double>();
  return largest * (0.5001 / 127 + Rounding(numbers.scalar_type()));
}

absl::Status Near(double actual, double expected, double tolerance,
                  absl::string_view what) {
  if (std::fabs(actual - expected) <= tolerance) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      what, " is ", actual, " and should be ", expected, " +- ", tolerance));
}

TEST(MessageLayoutTest, PartsAreAlignedAndDoNotOverlap) {
  for (at::ScalarType dtype : kDtypes) {
    const auto element = static_cast<int64_t>(c10::elementSize(dtype));
    for (int64_t numel : kSizes) {
      for (int64_t exact : {0, 1, 9, 2000}) {
        const MessageLayout layout(numel, exact, 256, dtype);
        EXPECT_EQ(layout.quantized() % 8, 0);
        EXPECT_GE(layout.exact(), std::min(exact, numel));
        EXPECT_LT(layout.exact(), std::min(exact, numel) + 8);
        const at::Tensor messages = at::empty({2 * layout.bytes()}, at::kByte);
        const at::Tensor scales = layout.Scales(messages)[1];
        const at::Tensor tail = layout.Exact(messages)[1];
        const at::Tensor values = layout.Values(messages)[1];
        EXPECT_EQ(scales.storage_offset() * 4, layout.bytes());
        EXPECT_GE(tail.storage_offset() * element,
                  layout.bytes() + scales.numel() * 4);
        EXPECT_GE(values.storage_offset(),
                  (tail.storage_offset() + tail.numel()) * element);
        EXPECT_GE(2 * layout.bytes(), values.storage_offset() + values.numel());
        EXPECT_EQ(values.storage_offset() % 16, 0);
        EXPECT_EQ(tail.storage_offset() * element % 16, 0);
      }
    }
  }
}

absl::Status GatherOnce(Communicator& comm, at::ScalarType dtype, int64_t n,
                        int64_t block, bool in_place) {
  const int ranks = comm.world_size();
  const at::Tensor out = at::full({n * ranks}, 77, dtype);
  at::Tensor in = RandomNumbers(comm.rank(), dtype, n);
  if (in_place) {
    const at::Tensor own = out.narrow(0, comm.rank() * n, n);
    own.copy_(in);
    in = own;
  }
  FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(out, in, "w")));
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor sent = RandomNumbers(rank, dtype, n);
    const at::Tensor seen = ranks == 1 ? sent : Seen(sent, 0, block);
    const at::Tensor part = out.narrow(0, rank * n, n);
    if (!SameBits(part, seen)) return absl::InternalError("other bits");
    for (int64_t i = 0; i < n; ++i) {
      FSDP_RETURN_IF_ERROR(Near(part[i].item<double>(), sent[i].item<double>(),
                                Tolerance(sent, i, block), "a number"));
    }
  }
  return absl::OkStatus();
}

TEST(QuantizedAllGatherTest, AllRanksSeeTheSameCloseNumbers) {
  for (int world_size : kWorldSizes) {
    for (int64_t block : {32, 256}) {
      QuantizationOptions options;
      options.block = block;
      EXPECT_OK(RunQuantized(world_size, options,
                             [block](Communicator& comm) -> absl::Status {
                               for (at::ScalarType dtype : kDtypes) {
                                 for (int64_t n : {0, 1, 7, 8, 257, 1021}) {
                                   for (bool in_place : {false, true}) {
                                     FSDP_RETURN_IF_ERROR(GatherOnce(
                                         comm, dtype, n, block, in_place));
                                   }
                                 }
                               }
                               return absl::OkStatus();
                             }))
          << world_size;
    }
  }
}

// What rank `rank` puts in: numbers, then flags of zeros and ones.
at::Tensor Gradients(int rank, int world_size, at::ScalarType dtype, int64_t n,
                     int64_t flags) {
  const at::Tensor numbers = RandomNumbers(rank, dtype, n * world_size);
  for (int segment = 0; segment < world_size; ++segment) {
    for (int64_t i = 0; i < std::min(flags, n); ++i) {
      numbers[segment * n + n - 1 - i] = (rank + i) % 3 == 0 ? 1 : 0;
    }
  }
  return numbers;
}

struct SumCase {
  at::ScalarType from = at::kFloat;
  at::ScalarType to = at::kFloat;
  int64_t n = 0;
  ScaledSum sum;
  enum { kInPlace, kApart, kScaled } way = kApart;
};

constexpr int64_t kFlags = 5;
constexpr int64_t kBlock = 64;

absl::Status SumOnce(Communicator& comm, const SumCase& test) {
  const int ranks = comm.world_size();
  const int64_t n = test.n;
  const at::Tensor in = Gradients(comm.rank(), ranks, test.from, n, kFlags);
  at::Tensor out = at::full({n}, 3, test.to);
  if (test.way == SumCase::kInPlace) out = in.narrow(0, comm.rank() * n, n);
  FSDP_RETURN_IF_ERROR(
      Finish(test.way == SumCase::kScaled
                 ? comm.ReduceScatterScaled(out, in, test.sum, "grads")
                 : comm.ReduceScatter(out, in, ReduceOp::kSum, "grads")));
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < ranks; ++rank) {
    inputs.push_back(Gradients(rank, ranks, test.from, n, kFlags)
                         .narrow(0, comm.rank() * n, n));
  }
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    double tolerance = 0;
    for (const at::Tensor& input : inputs) {
      sum += input[i].item<double>();
      tolerance += Tolerance(input, i, kBlock);
    }
    const double held = test.sum.accumulate ? 3 : 0;
    const double expected = held + test.sum.scale * sum;
    tolerance = test.sum.scale * tolerance +
                (std::fabs(expected) + tolerance) * Rounding(test.to);
    const bool is_flag = i >= n - kFlags;
    FSDP_RETURN_IF_ERROR(Near(out[i].item<double>(), expected,
                              is_flag ? 0 : tolerance,
                              is_flag ? "a flag" : "a sum"));
  }
  return absl::OkStatus();
}

TEST(QuantizedReduceScatterTest, SumsAreCloseAndFlagsExact) {
  QuantizationOptions options;
  options.block = kBlock;
  options.exact_tail = kFlags;
  for (int world_size : kWorldSizes) {
    EXPECT_OK(
        RunQuantized(world_size, options,
                     [](Communicator& comm) -> absl::Status {
                       for (at::ScalarType from : kDtypes) {
                         for (int64_t n : {0, 1, 7, 8, 13, 257}) {
                           SumCase test{from, from, n, {}, SumCase::kApart};
                           FSDP_RETURN_IF_ERROR(SumOnce(comm, test));
                           test.way = SumCase::kInPlace;
                           FSDP_RETURN_IF_ERROR(SumOnce(comm, test));
                           test.way = SumCase::kScaled;
                           test.to = at::kFloat;
                           test.sum.scale = 0.5;
                           FSDP_RETURN_IF_ERROR(SumOnce(comm, test));
                           test.sum.accumulate = true;
                           FSDP_RETURN_IF_ERROR(SumOnce(comm, test));
                         }
                       }
                       return absl::OkStatus();
                     }))
        << world_size;
  }
}

TEST(QuantizedReduceScatterTest, GivesTheSameBitsEveryTime) {
  constexpr int kRanks = 3;
  constexpr int64_t kSize = 1021;
  EXPECT_OK(RunQuantized(kRanks, {}, [](Communicator& comm) -> absl::Status {
    at::Tensor first;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const at::Tensor in =
          RandomNumbers(comm.rank(), at::kBFloat16, kSize * kRanks);
      const at::Tensor out = at::zeros({kSize}, at::kFloat);
      FSDP_RETURN_IF_ERROR(
          Finish(comm.ReduceScatterScaled(out, in, {1.0 / 3, false}, "w")));
      if (repeat == 0) first = out;
      if (!SameBits(first, out)) return absl::InternalError("other bits");
    }
    return absl::OkStatus();
  }));
}

TEST(QuantizedReduceScatterTest, WhatIsNotFiniteIsNotLost) {
  EXPECT_OK(RunQuantized(2, {}, [](Communicator& comm) -> absl::Status {
    const at::Tensor in = RandomNumbers(comm.rank(), at::kFloat, 2 * 1024);
    if (comm.rank() == 0) in[300] = std::numeric_limits<float>::infinity();
    const at::Tensor out = at::zeros({1024});
    FSDP_RETURN_IF_ERROR(
        Finish(comm.ReduceScatter(out, in, ReduceOp::kSum, "w")));
    const bool is_finite = std::isfinite(out.sum().item<double>());
    if (is_finite != (comm.rank() == 1)) return absl::InternalError("lost");
    return absl::OkStatus();
  }));
}

// One call of each kind on two ranks.
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

// Of 1024 numbers: 1024 bytes and 4 scales, from each of two ranks.
TEST(QuantizedBytesTest, AreAByteForEachNumberAndTheScales) {
  EXPECT_EQ(Sent({}, at::kFloat),
            "1 x 2080; 1 x 8192; 2 x 2080; 1 x 8192; 1 x 8192; ");
  EXPECT_EQ(Sent({}, at::kBFloat16),
            "1 x 2080; 1 x 4096; 2 x 2080; 1 x 4096; 1 x 4096; ");
}

TEST(QuantizedBytesTest, FlagsTravelAsTheyAre) {
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
            "1 x 8192; 2 x 8192; 0 x 0; 1 x 8192; "
            "1 x 8192; ");
}

TEST(QuantizationLogTest, HoldsWhatWasLost) {
  QuantizationLog log;
  QuantizationOptions options;
  options.log = &log;
  EXPECT_OK(RunQuantized(2, options, [](Communicator& comm) -> absl::Status {
    const at::Tensor in = at::full({16}, 0.25);
    in[0] = 127;
    FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(at::zeros({32}), in, "a")));
    return CallAll(comm, at::kFloat);
  }));
  const QuantizationLog::Totals gathers =
      log.TotalsOf(Collective::kAllGather, "a");
  EXPECT_EQ(gathers.count, 2);
  EXPECT_EQ(gathers.error.max_abs, 0.25);
  EXPECT_EQ(gathers.error.squared_error, 2 * 15 * 0.0625);
  EXPECT_EQ(log.TotalsOf(Collective::kAllGather).count, 4);
  const QuantizationLog::Totals sums = log.TotalsOf(Collective::kReduceScatter);
  EXPECT_EQ(sums.count, 4);
  EXPECT_LT(sums.error.relative_l2(), 1e-6);
  EXPECT_EQ(sums.error.not_finite, 0);
  log.Clear();
  EXPECT_EQ(log.TotalsOf(Collective::kAllGather).count, 0);
}

// As steps that a gradient scaler skips are.
TEST(QuantizationLogTest, AnOverflowIsCountedAndSpoilsNothing) {
  QuantizationLog log;
  QuantizationOptions options;
  options.log = &log;
  EXPECT_OK(RunQuantized(2, options, [](Communicator& comm) -> absl::Status {
    for (const bool overflows : {false, true, false}) {
      const at::Tensor in = at::full({2 * 1024}, 0.25);
      in[0] = 127;
      if (overflows) in[700] = std::numeric_limits<float>::infinity();
      FSDP_RETURN_IF_ERROR(Finish(
          comm.ReduceScatter(at::zeros({1024}), in, ReduceOp::kSum, "w")));
    }
    return absl::OkStatus();
  }));
  const QuantizationLog::Totals sums = log.TotalsOf(Collective::kReduceScatter);
  EXPECT_EQ(sums.count, 2 * 3);
  EXPECT_EQ(sums.error.not_finite, 2 * 256);
  EXPECT_EQ(sums.error.max_abs, 0.25);
  EXPECT_NEAR(sums.error.squared_error, 2 * 3 * 255 * 0.0625, 1e-6);
}

// One rank of three that all pass the same.
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

// Calls on the current stream, what comes of them on `side`; what is between is
// freed and its memory used again while that stream may still be reading it.
Results OnTwoStreams(c10::Device device, const at::Tensor& numbers) {
  const std::unique_ptr<Communicator> comm = QuantizedLoopback(device);
  const at::Tensor in = numbers.to(device);
  const Results results = {
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
  const at::Tensor numbers = RandomNumbers(1, at::kBFloat16, 3 * 1021);
  const Results expected = OnTwoStreams(at::kCPU, numbers);
  FakeDevice::Reset();
  const Results actual = OnTwoStreams(FakeDevice::device(), numbers);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  // The copy of `numbers` to the device.
  EXPECT_EQ(FakeDevice::HostWaits().size(), 1u);
  EXPECT_TRUE(SameBits(actual.gathered.cpu(), expected.gathered));
  EXPECT_TRUE(SameBits(actual.summed.cpu(), expected.summed));
}

// One rank of three on a device of which nothing is known yet, and what it
// gathers.
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
                StatusIs(absl::StatusCode::kDeadlineExceeded,
                         HasSubstr("all-gather of w on rank 1 of 3")));
  }
  EXPECT_THAT(
      work->Wait(absl::InfiniteFuture()),
      StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("deadline")));
  EXPECT_THAT(comm->AllGather(out, in, "w").status(),
              StatusIs(absl::StatusCode::kAborted,
                       HasSubstr("is not done at the deadline")));
}

// On an output that turns out too small, which only the last part notices.
TEST(QuantizedCommunicatorTest, WhatCannotBeFinishedEndsTheGroup) {
  const auto [comm, in, out] = DeviceGather();
  SideStream side(FakeDevice::device());
  {
    auto work = comm->AllGather(out, in, "w").value();
    out.unsafeGetTensorImpl()->set_sizes_contiguous({191});
    const SideStream::Scope scope(side);
    EXPECT_THAT(work->BlockCurrentStream(),
                StatusIs(absl::StatusCode::kInternal,
                         HasSubstr("all-gather of w on rank 1 of 3")));
  }
  EXPECT_THAT(comm->AllGather(at::zeros({192}, in.options()), in, "w").status(),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("aborted")));
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

TEST(QuantizedCommunicatorTest, HasNoMemoryInCommonWhereGathersAreQuantised) {
  ASSERT_OK_AND_ASSIGN(const Group group, QuantizedGroup(1, {}));
  EXPECT_THAT(group[0]->AllocateCommon(64).status(),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("would not be quantised")));
  EXPECT_THAT(group[0]->ToString(), StartsWith("quantised local"));
}

TEST(QuantizedCommunicatorTest, FailsAsItsBase) {
  ASSERT_OK_AND_ASSIGN(const Group group, QuantizedGroup(2, {}));
  ASSERT_OK_AND_ASSIGN(
      auto work, group[0]->AllGather(at::zeros({64}), at::zeros({32}), "w"));
  group[1]->Abort(absl::DataLossError("torn page"));
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_THAT(work->BlockCurrentStream(),
                StatusIs(absl::StatusCode::kAborted, HasSubstr("torn page")));
    EXPECT_THAT(work->Wait(absl::InfinitePast()),
                StatusIs(absl::StatusCode::kAborted, HasSubstr("torn page")));
  }
}

TEST(QuantizedCommunicatorTest, RefusesOptionsOutOfRange) {
  QuantizationOptions wrong[4];
  wrong[0].block = 0;
  wrong[1].min_bytes = -1;
  wrong[2].exact_tail = -1;
  wrong[3].block = (int64_t{1} << 30) + 1;
  for (const QuantizationOptions& options : wrong) {
    EXPECT_THAT(QuantizedGroup(1, options).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("quantise local, rank 0 of 1 in blocks")));
  }
}

}  // namespace
}  // namespace fsdp::comm::testing
