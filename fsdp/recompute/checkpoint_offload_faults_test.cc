// Regions whose arguments are offloaded to stores that fail, are slow or full.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "fsdp/testing/offloaded_regions.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/testing/faulty_store.h"

namespace fsdp {
namespace {

using ::fsdp::offload::testing::Fault;
using ::fsdp::offload::testing::FaultOf;
using ::fsdp::offload::testing::WithFaults;
using ::fsdp::offloaded_regions::Backward;
using ::fsdp::offloaded_regions::Chain;
using ::fsdp::offloaded_regions::Host;
using ::fsdp::offloaded_regions::Offload;
using ::fsdp::offloaded_regions::Same;
using ::fsdp::offloaded_regions::Step;
using ::fsdp::offloaded_regions::With;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

class FaultTest : public ::testing::TestWithParam<Fault::Effect> {};

TEST_P(FaultTest, AnyWriteThatFailsChangesNothingButMemory) {
  Chain chain(4);
  const std::vector<at::Tensor> expected = Step(chain, {});
  for (int64_t nth = 0; nth < 4; ++nth) {
    const auto offload = Offload(WithFaults(
        Host(), {FaultOf(Fault::Operation::kWrite, GetParam(), nth)}));
    EXPECT_TRUE(Same(Step(chain, With(offload)), expected)) << nth;
    EXPECT_EQ(offload->stats().failed, 1);
    EXPECT_EQ(offload->stats().tensors_out, 3);
    EXPECT_TRUE(Same(Step(chain, With(offload)), expected)) << nth;
    EXPECT_EQ(offload->stats().stored_bytes, 0);
  }
}

TEST_P(FaultTest, AnyReadThatFailsForGoodFailsBackwardWhichMayBeTriedAgain) {
  Chain chain(4);
  const std::vector<at::Tensor> expected = Step(chain, {});
  for (int64_t nth = 0; nth < 4; ++nth) {
    // The first read is needed at once; the others read ahead.
    const int64_t count = nth == 0 ? 1 : 2;
    const auto offload = Offload(WithFaults(
        Host(), {FaultOf(Fault::Operation::kRead, GetParam(), nth, count)}));
    at::Tensor loss = chain.Loss(With(offload));
    EXPECT_THAT(
        Backward(loss, /*retain_graph=*/true),
        StatusIs(Code::kUnavailable,
                 AllOf(HasSubstr("move tensor 0 in the arguments of a "
                                 "checkpointed region, Float [3, 5] on cpu"),
                       HasSubstr(absl::StrCat(
                           "read region 'activation ", 2 * (3 - nth),
                           " of a checkpointed region', offset 0, 60 bytes")),
                       HasSubstr("injected failure"))));
    chain.TakeGradients();
    EXPECT_OK(Backward(loss));
    std::vector<at::Tensor> results = chain.TakeGradients();
    results.push_back(loss.detach());
    EXPECT_TRUE(Same(results, expected)) << nth;
    loss.reset();
    EXPECT_EQ(offload->stats().stored_bytes, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Effects, FaultTest,
                         ::testing::Values(Fault::Effect::kRefuse,
                                           Fault::Effect::kFail,
                                           Fault::Effect::kShorten));

TEST(SlowStoreTest, DelaysChangeNoBit) {
  Chain chain(6);
  const std::vector<at::Tensor> expected = Step(chain, {});
  Fault reads =
      FaultOf(Fault::Operation::kRead, Fault::Effect::kDelay, 0, 1000);
  reads.delay = absl::Milliseconds(2);
  Fault writes =
      FaultOf(Fault::Operation::kWrite, Fault::Effect::kDelay, 0, 1000);
  for (int delay : {1, 5, 100'000'000}) {
    writes.delay = absl::Milliseconds(delay);
    const auto offload = Offload(WithFaults(Host(), {reads, writes}));
    EXPECT_TRUE(Same(Step(chain, With(offload)), expected)) << delay;
  }
}

TEST(SlowStoreTest, AReadThatNeverEndsFailsBackwardAtTheDeadline) {
  Chain chain(3);
  Fault reads =
      FaultOf(Fault::Operation::kRead, Fault::Effect::kDelay, 0, 1000);
  reads.delay = absl::Hours(1000);
  const auto offload =
      Offload(WithFaults(Host(), {reads}), absl::Milliseconds(1));
  const at::Tensor loss = chain.Loss(With(offload));
  EXPECT_THAT(Backward(loss),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("read region 'activation 4 of")));
}

TEST(FullStoreTest, WhatHasNoRoomStaysInMemoryAndTheRunGoesOn) {
  Chain chain(6);
  const std::vector<at::Tensor> expected = Step(chain, {});
  for (int64_t regions : {0, 1, 3}) {
    const auto offload = Offload(Host(regions));
    EXPECT_TRUE(Same(Step(chain, With(offload)), expected)) << regions;
    EXPECT_EQ(offload->stats().tensors_out, regions);
    EXPECT_EQ(offload->stats().full, 6 - regions);
    EXPECT_EQ(offload->stats().failed, 0);
  }
}

}  // namespace
}  // namespace fsdp
