// All-gathers that send what an extension makes of numbers.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/largest_difference.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/quantized/quantization_log.h"
#include "comm/quantized/quantized_communicator.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::LargestDifference;

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
}  // namespace fsdp::comm
