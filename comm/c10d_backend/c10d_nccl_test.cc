// Runs where a GPU is; with one rank, since NCCL takes a GPU for each.
#include "comm/c10d_backend/c10d_nccl.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/finish.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::Finish;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kSizes[] = {0, 1, 7, 1021};
constexpr at::ScalarType kDtypes[] = {at::kFloat,    at::kDouble, at::kHalf,
                                      at::kBFloat16, at::kInt,    at::kLong,
                                      at::kByte};

absl::StatusOr<std::unique_ptr<Communicator>> CreateAlone() {
  C10dNcclOptions options;
  options.timeout = absl::Seconds(30);
  options.device = 0;
  return CreateC10dNcclCommunicator(c10::make_intrusive<c10d::HashStore>(), 0,
                                    1, options);
}

at::TensorOptions OnGpu(at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(at::kCUDA, 0);
}

at::Tensor Values(int64_t n, at::ScalarType dtype) {
  return at::arange(n, OnGpu(at::kLong)).mul(3).remainder(9).to(dtype);
}

at::Tensor Empty(int64_t n, at::ScalarType dtype) {
  return at::full({n}, 100, OnGpu(dtype));
}

TEST(C10dNcclTest, ARankAloneMovesEveryDtype) {
  ASSERT_OK_AND_ASSIGN(const auto comm, CreateAlone());
  for (at::ScalarType dtype : kDtypes) {
    for (int64_t n : kSizes) {
      const at::Tensor values = Values(n, dtype);
      const at::Tensor gathered = Empty(n, dtype);
      EXPECT_OK(Finish(comm->AllGather(gathered, values, "gather")));
      EXPECT_TRUE(at::equal(gathered, values));
      const at::Tensor reduced = Empty(n, dtype);
      EXPECT_OK(Finish(
          comm->ReduceScatter(reduced, values, ReduceOp::kSum, "reduce")));
      EXPECT_TRUE(at::equal(reduced, values));
      const at::Tensor exchanged = Empty(n, dtype);
      EXPECT_OK(Finish(comm->AllToAll(exchanged, values, "exchange")));
      EXPECT_TRUE(at::equal(exchanged, values));
      EXPECT_OK(Finish(comm->AllReduce(exchanged, ReduceOp::kMax, "sum")));
      EXPECT_OK(Finish(comm->Broadcast(exchanged, 0, "copy")));
      EXPECT_TRUE(at::equal(exchanged, values));
    }
  }
}

TEST(C10dNcclTest, ScaledSumsGoIntoAnyFloatingDtype) {
  ASSERT_OK_AND_ASSIGN(const auto comm, CreateAlone());
  for (at::ScalarType from : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (bool accumulate : {false, true}) {
      const at::Tensor in = Values(1021, from);
      const at::Tensor out = Empty(1021, at::kFloat);
      const at::Tensor expected =
          in.to(at::kFloat).mul(0.25).add(accumulate ? 100 : 0);
      EXPECT_OK(Finish(
          comm->ReduceScatterScaled(out, in, {0.25, accumulate}, "mean")));
      EXPECT_TRUE(at::equal(out, expected));
    }
  }
}

TEST(C10dNcclTest, RunsInTheOrderOfTheCurrentStream) {
  ASSERT_OK_AND_ASSIGN(const auto comm, CreateAlone());
  at::Tensor sum = Empty(1 << 24, at::kFloat);
  for (int step = 1; step <= 20; ++step) {
    sum.fill_(step);
    ASSERT_OK_AND_ASSIGN(auto work,
                         comm->AllReduce(sum, ReduceOp::kSum, "step"));
    ASSERT_OK(work->BlockCurrentStream());
    sum.mul_(2);
  }
  EXPECT_TRUE(at::equal(sum, at::full_like(sum, 40)));
}

TEST(C10dNcclTest, SplitsAndLeavesInPeace) {
  ASSERT_OK_AND_ASSIGN(auto comm, CreateAlone());
  ASSERT_OK_AND_ASSIGN(auto part, comm->Split(3, 0));
  EXPECT_EQ(part->ToString(), "c10d's nccl on cuda:0, rank 0 of 1");
  const at::Tensor values = Values(7, at::kFloat);
  EXPECT_OK(Finish(part->AllReduce(values, ReduceOp::kSum, "part")));
  comm.reset();
  EXPECT_OK(Finish(part->AllReduce(values, ReduceOp::kSum, "part")));
}

TEST(C10dNcclTest, AnAbortIsWhatLaterCallsReturn) {
  ASSERT_OK_AND_ASSIGN(auto comm, CreateAlone());
  const at::Tensor values = Values(7, at::kFloat);
  ASSERT_OK(Finish(comm->AllReduce(values, ReduceOp::kSum, "sum")));
  comm->Abort(absl::ResourceExhaustedError("disk full"));
  EXPECT_THAT(comm->AllReduce(values, ReduceOp::kSum, "sum"),
              StatusIs(absl::StatusCode::kAborted,
                       HasSubstr("rank 0 aborted: disk full")));
}

TEST(C10dNcclTest, NamesTheRanksThatDoNotCome) {
  C10dNcclOptions options;
  options.timeout = absl::Milliseconds(50);
  options.device = 0;
  EXPECT_THAT(CreateC10dNcclCommunicator(c10::make_intrusive<c10d::HashStore>(),
                                         1, 2, options),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("rank 0 has not come")));
}

}  // namespace
}  // namespace fsdp::comm
