// Tests how close quantised numbers and sums are to the originals, and that all
// ranks see the same.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/check_that.h"
#include "base/testing/compare_tensors.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/quantized/quantization_log.h"
#include "comm/quantized/quantized_communicator.h"
#include "comm/testing/quantized_group.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::CheckThat;
using ::fsdp::testing::LargestDifference;

constexpr int kWorldSizes[] = {1, 2, 3, 5};
constexpr int64_t kSizes[] = {0, 1, 7, 8, 257, 1021, 10'007};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,
                                      at::kBFloat16};

// Returns what the others see of `numbers`, of which the last `exact` are
// exact.
at::Tensor Seen(const at::Tensor& numbers, int64_t exact, int64_t block) {
  const MessageLayout layout(numbers.numel(), exact, block,
                             numbers.scalar_type());
  if (layout.quantized() == 0) return numbers;
  const at::Tensor message = at::empty({layout.bytes()}, at::kByte);
  at::Tensor seen = at::empty(numbers.sizes(), numbers.options());
  WriteMessages(layout, numbers, message);
  ReadMessages(layout, message, seen);
  return seen;
}

double Rounding(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 1.0 / 256
         : dtype == at::kHalf   ? 1.0 / 2048
                                : 1e-6;
}

// Returns half a step of the block's scale, and the rounding of the result.
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
    if (!SameBits(part, seen)) {
      return absl::InternalError(absl::StrCat("other bits, off by up to ",
                                              LargestDifference(part, seen)));
    }
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

// Returns the input of rank `rank`: numbers, then flags of zeros and ones.
at::Tensor Gradients(int rank, int world_size, at::ScalarType dtype, int64_t n,
                     int64_t flags) {
  at::Tensor numbers = RandomNumbers(rank, dtype, n * world_size);
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
  inputs.reserve(ranks);
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
      if (SameBits(first, out)) continue;
      return absl::InternalError(absl::StrCat("other bits, off by up to ",
                                              LargestDifference(first, out)));
    }
    return absl::OkStatus();
  }));
}

QuantizationError ErrorOf(const at::Tensor& numbers, int64_t block) {
  const MessageLayout layout(numbers.numel(), /*exact=*/0, block,
                             numbers.scalar_type());
  const at::Tensor message = at::empty({layout.bytes()}, at::kByte);
  WriteMessages(layout, numbers, message);
  return MeasureMessages(layout, numbers, message);
}

TEST(MeasureMessagesTest, TellsWhatIsLostAndCountsWhatIsNotFiniteApart) {
  for (at::ScalarType dtype : kDtypes) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(),
                      std::numeric_limits<float>::infinity()}) {
      const at::Tensor in = at::zeros({16}, dtype);
      in[1] = 127;
      in[2] = 0.25;
      in[5] = bad;
      in[6] = 1;
      in[9] = 127;
      const QuantizationError error = ErrorOf(in, /*block=*/4);
      EXPECT_EQ(error.not_finite, 4);
      EXPECT_EQ(error.max_abs, 0.25);
      EXPECT_EQ(error.squared_error, 0.0625);
      EXPECT_EQ(error.squared_norm, 2 * 127 * 127 + 0.0625);
      EXPECT_DOUBLE_EQ(error.relative_l2(),
                       0.25 / std::sqrt(2 * 127 * 127 + 0.0625));
    }
  }
}

TEST(MeasureMessagesTest, OfZerosNothingIsLost) {
  const QuantizationError error = ErrorOf(at::zeros({8}), /*block=*/2);
  EXPECT_EQ(error.max_abs, 0);
  EXPECT_EQ(error.relative_l2(), 0);
}

// Sends float32 as bfloat16, behind a header of 16 bytes with the rank's sum.
class Bf16Gathers : public GatherExtension {
 public:
  std::string ToString() const override { return "bf16"; }
  int64_t MessageBytes(int64_t numel, at::ScalarType dtype,
                       int) const override {
    return dtype == at::kFloat ? 16 + 2 * numel : 0;
  }
  void Write(absl::string_view label, const at::Tensor& numbers,
             const at::Tensor& message) override {
    TORCH_CHECK(label != "refused", "no message for this one");
    message.narrow(0, 0, 4).view(at::kFloat).copy_(numbers.sum());
    message.narrow(0, 16, 2 * numbers.numel())
        .view(at::kBFloat16)
        .copy_(numbers);
  }
  void Read(absl::string_view label, const at::Tensor& messages,
            const at::Tensor& numbers) override {
    TORCH_CHECK(label != "unread", "no numbers of this one");
    numbers.copy_(messages.narrow(1, 16, 2 * numbers.size(1))
                      .contiguous()
                      .view(at::kBFloat16));
    last_sum = messages[-1].narrow(0, 0, 4).view(at::kFloat).item<float>();
  }
  float last_sum = 0;  // of the last rank's numbers
};

at::Tensor Numbers(int rank, int64_t numel, at::ScalarType dtype) {
  return at::arange(1, numel + 1, at::kFloat).mul(1 + rank).div(7).to(dtype);
}

absl::Status Gather(Communicator& group, int64_t numel, at::ScalarType dtype,
                    absl::string_view label, at::Tensor& out) {
  out = at::full({numel * group.world_size()}, -1, dtype);
  FSDP_ASSIGN_OR_RETURN(
      auto work,
      group.AllGather(out, Numbers(group.rank(), numel, dtype), label));
  return work->Wait(absl::Now() + absl::Seconds(30));
}

// A rank's group and its extension.
struct Extended {
  std::shared_ptr<Bf16Gathers> extension;
  std::unique_ptr<Communicator> group;
};

absl::StatusOr<Extended> Extend(Communicator& world, CollectiveLog* log) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> own,
                        world.Split(0, world.rank()));
  Extended result{std::make_shared<Bf16Gathers>(), nullptr};
  QuantizationOptions options;
  options.reduce = false;
  options.min_bytes = int64_t{1} << 40;  // of int8 alone
  options.gather_extension = result.extension;
  FSDP_ASSIGN_OR_RETURN(
      result.group,
      CreateQuantizedCommunicator(Record(std::move(own), log), options));
  return result;
}

TEST(GatherExtensionTest, AllRanksSeeWhatWasMadeOfTheMessages) {
  for (const int ranks : {1, 2, 3, 5}) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      CollectiveLog log;
      FSDP_ASSIGN_OR_RETURN(Extended extended, Extend(world, &log));
      constexpr int64_t kNumel = 24;
      at::Tensor out;
      FSDP_RETURN_IF_ERROR(
          Gather(*extended.group, kNumel, at::kFloat, "w", out));
      for (int rank = 0; rank < ranks; ++rank) {
        at::Tensor expected = Numbers(rank, kNumel, at::kFloat);
        if (ranks > 1) expected = expected.to(at::kBFloat16).to(at::kFloat);
        const at::Tensor part = out.narrow(0, rank * kNumel, kNumel);
        if (part.equal(expected)) continue;
        return absl::InternalError(
            absl::StrCat("numbers of rank ", rank, " are off by up to ",
                         LargestDifference(part, expected)));
      }
      const int64_t bytes = ranks > 1 ? ranks * (16 + 2 * kNumel) : 4 * kNumel;
      const int64_t moved = log.TotalsOf(Collective::kAllGather).bytes;
      FSDP_RETURN_IF_ERROR(CheckThat(moved, bytes, "bytes moved"));
      const float sum =
          Numbers(ranks - 1, kNumel, at::kFloat).sum().item<float>();
      if (ranks == 1) return absl::OkStatus();
      return CheckThat(extended.extension->last_sum, sum,
                       "what else is in the message");
    }));
  }
}

TEST(GatherExtensionTest, WhatItHasNoMessageForTravelsAsItIs) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    CollectiveLog log;
    FSDP_ASSIGN_OR_RETURN(Extended extended, Extend(world, &log));
    at::Tensor out;
    FSDP_RETURN_IF_ERROR(Gather(*extended.group, 5, at::kDouble, "w", out));
    const at::Tensor part = out.narrow(0, 5, 5);
    const at::Tensor expected = Numbers(1, 5, at::kDouble);
    if (part.equal(expected)) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("numbers are off by up to ",
                                            LargestDifference(part, expected)));
  }));
}

TEST(GatherExtensionTest, WhatItThrowsNamesTheCollective) {
  for (const char* label : {"refused", "unread"}) {
    const auto statuses =
        RunRanks(2, [label](Communicator& world) -> absl::Status {
          CollectiveLog log;
          FSDP_ASSIGN_OR_RETURN(Extended extended, Extend(world, &log));
          at::Tensor out;
          return Gather(*extended.group, 4, at::kFloat, label, out);
        });
    for (const absl::Status& status : statuses) {
      EXPECT_TRUE(absl::StrContains(status.message(), label)) << status;
    }
  }
}

TEST(GatherExtensionTest, MessagesOfAGatherAreCounted) {
  QuantizationOptions options;
  options.gather_extension = std::make_shared<Bf16Gathers>();
  EXPECT_EQ(GatherMessageBytes(100, at::kFloat, 3, options), 3 * 216);
  EXPECT_EQ(GatherMessageBytes(100, at::kDouble, 3, options), 0);
  EXPECT_EQ(GatherMessageBytes(100, at::kFloat, 1, options), 0);
}

}  // namespace
}  // namespace fsdp::comm::testing
