// Runs on hosts with GPUs. Rank r has GPU r, so that there are groups of as
// many ranks as there are GPUs.
#include "comm/nccl/nccl_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::CheckThat;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

int NumDevices() {
  int num_devices = 0;
  static_cast<void>(cudaGetDeviceCount(&num_devices));
  return num_devices;
}

// Returns one, and every number of ranks that have a GPU each, up to eight.
std::vector<int> WorldSizes() {
  std::vector<int> sizes = {1};
  for (int size = 2; size <= std::min(NumDevices(), 8); ++size) {
    sizes.push_back(size);
  }
  return sizes;
}

absl::StatusOr<Group> CreateNcclGroup(int world_size,
                                      const NcclOptions& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return ConnectRanks(world_size, [&](int rank) {
    NcclOptions own = options;
    own.device = rank;
    return CreateNcclCommunicator(store, rank, world_size, own);
  });
}

ContractBackend WithAGpuForEachRank() {
  ContractBackend backend;
  backend.name = "Nccl";
  backend.create = [](int world_size, absl::Duration timeout) {
    NcclOptions options;
    options.timeout = timeout;
    return CreateNcclGroup(world_size, options);
  };
  backend.sums_in_rank_order = false;
  backend.compares_calls = false;
  backend.most_ranks = NumDevices();
  backend.calls_are_alone = false;
  backend.enter = [](int rank) {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(rank));
  };
  backend.device = c10::Device(c10::DeviceType::CUDA);
  backend.begin = [] {
    if (NumDevices() == 0) GTEST_SKIP() << "there is no GPU";
  };
  return backend;
}

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorContract,
                         ::testing::Values(WithAGpuForEachRank()), BackendName);

// Runs every rank with its GPU as the current one.
absl::Status RunOnGpus(int world_size, const RankFunction& fn,
                       NcclOptions options = {}) {
  options.timeout = absl::Seconds(30);
  FSDP_ASSIGN_OR_RETURN(const Group group,
                        CreateNcclGroup(world_size, options));
  return AllOk(RunRanks(group, [&](Communicator& comm) {
    const c10::cuda::CUDAGuard guard(
        static_cast<c10::DeviceIndex>(comm.rank()));
    return fn(comm);
  }));
}

at::TensorOptions OnGpu(at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().dtype(dtype).device(at::kCUDA);
}

// Returns (rank * 7 + i * 3) % 9 at index i of `n`: exact in every dtype, as
// are sums of eight.
at::Tensor Values(int rank, int64_t n, at::ScalarType dtype) {
  return at::arange(n, OnGpu(at::kLong))
      .mul(3)
      .add(rank * 7)
      .remainder(9)
      .to(dtype);
}

at::Tensor SumOfRanks(int world_size, int64_t n, at::ScalarType dtype) {
  at::Tensor sum = Values(0, n, at::kDouble);
  for (int rank = 1; rank < world_size; ++rank) {
    sum.add_(Values(rank, n, at::kDouble));
  }
  return sum.to(dtype);
}

absl::Status ExpectEqual(const at::Tensor& actual, const at::Tensor& expected,
                         absl::string_view what) {
  if (at::equal(actual, expected)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": wrong numbers in ",
                                          actual.numel(), " x ",
                                          DtypeName(actual.scalar_type())));
}

class NcclCommunicatorTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, NcclCommunicatorTest,
                         ::testing::ValuesIn(WorldSizes()),
                         ::testing::PrintToStringParamName());

absl::Status GatherOnce(Communicator& comm, int64_t n) {
  const at::Tensor out = at::zeros({n * comm.world_size()}, OnGpu());
  const at::Tensor in = Values(comm.rank(), n, at::kFloat);
  FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(out, in, "gather")));
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    FSDP_RETURN_IF_ERROR(ExpectEqual(out.narrow(0, rank * n, n),
                                     Values(rank, n, at::kFloat), "gather"));
  }
  return absl::OkStatus();
}

TEST_P(NcclCommunicatorTest, RunsInTheOrderOfTheCurrentStreamWithoutTheHost) {
  constexpr int64_t kLarge = 1 << 24;
  EXPECT_OK(RunOnGpus(GetParam(), [](Communicator& comm) -> absl::Status {
    const auto side = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStreamGuard on_side(side);
    at::Tensor sum = at::zeros({kLarge}, OnGpu());
    for (int step = 1; step <= 20; ++step) {
      sum.fill_(step);
      FSDP_ASSIGN_OR_RETURN(auto work,
                            comm.AllReduce(sum, ReduceOp::kSum, "step"));
      FSDP_RETURN_IF_ERROR(work->BlockCurrentStream());
      sum.mul_(2);
    }
    return ExpectEqual(
        sum, at::full({kLarge}, 40.0 * comm.world_size(), OnGpu()), "stream");
  }));
}

TEST_P(NcclCommunicatorTest, ADroppedWorkKeepsItsTensors) {
  constexpr int64_t kLarge = 1 << 22;
  EXPECT_OK(RunOnGpus(GetParam(), [](Communicator& comm) -> absl::Status {
    at::Tensor kept = at::full({kLarge}, 1, OnGpu());
    {
      at::Tensor dropped = at::full({kLarge}, 1, OnGpu());
      FSDP_RETURN_IF_ERROR(
          comm.AllReduce(dropped, ReduceOp::kSum, "dropped").status());
    }
    // `other` would be given the memory of `dropped`, were it free.
    const at::Tensor other = at::full({kLarge}, 7, OnGpu());
    FSDP_RETURN_IF_ERROR(Finish(comm.AllReduce(kept, ReduceOp::kSum, "kept")));
    return ExpectEqual(other, at::full({kLarge}, 7, OnGpu()), "other memory");
  }));
}

TEST_P(NcclCommunicatorTest, SymmetricMemoryIsMemory) {
  for (NcclWindows windows :
       {NcclWindows::kAbortable, NcclWindows::kSymmetric, NcclWindows::kNone}) {
    NcclOptions options;
    options.windows = windows;
    const auto run = [](Communicator& comm) -> absl::Status {
      for (int64_t bytes : {0, 4, 4096, 1'000'003}) {
        FSDP_ASSIGN_OR_RETURN(
            at::Tensor memory,
            comm.AllocateSymmetric(bytes * comm.world_size()));
        FSDP_RETURN_IF_ERROR(
            CheckThat(memory.numel(), bytes * comm.world_size(), "bytes"));
        FSDP_RETURN_IF_ERROR(
            CheckThat(int{memory.device().index()}, comm.rank(), "device"));
        FSDP_RETURN_IF_ERROR(
            CheckThat(reinterpret_cast<uintptr_t>(memory.data_ptr()) % 64, 0U,
                      "address, modulo 64"));
        const at::Tensor slice = memory.narrow(0, comm.rank() * bytes, bytes);
        slice.copy_(Values(comm.rank(), bytes, at::kByte));
        FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(memory, slice, "window")));
        for (int rank = 0; rank < comm.world_size(); ++rank) {
          FSDP_RETURN_IF_ERROR(
              ExpectEqual(memory.narrow(0, rank * bytes, bytes),
                          Values(rank, bytes, at::kByte), "symmetric memory"));
        }
      }
      return CheckThat(comm.AllocateSymmetric(-1).ok(), false,
                       "gives -1 bytes");
    };
    EXPECT_OK(RunOnGpus(GetParam(), run, options)) << static_cast<int>(windows);
  }
}

// Shards and sums as well as whole buffers are in windows of their own group.
TEST_P(NcclCommunicatorTest, PartsHaveSymmetricMemory) {
  constexpr int64_t kNumel = 4096;
  EXPECT_OK(RunOnGpus(GetParam(), [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto part, comm.Split(comm.rank() % 2, comm.rank()));
    const int64_t whole = kNumel * part->world_size();
    FSDP_ASSIGN_OR_RETURN(at::Tensor own, part->AllocateSymmetric(4 * kNumel));
    FSDP_ASSIGN_OR_RETURN(at::Tensor all, part->AllocateSymmetric(4 * whole));
    own = own.view(at::kFloat);
    all = all.view(at::kFloat);
    own.copy_(Values(part->rank(), kNumel, at::kFloat));
    FSDP_RETURN_IF_ERROR(Finish(part->AllGather(all, own, "gather")));
    for (int rank = 0; rank < part->world_size(); ++rank) {
      FSDP_RETURN_IF_ERROR(ExpectEqual(all.narrow(0, rank * kNumel, kNumel),
                                       Values(rank, kNumel, at::kFloat),
                                       "gather of a part"));
    }
    all.copy_(Values(part->rank(), whole, at::kFloat));
    FSDP_RETURN_IF_ERROR(
        Finish(part->ReduceScatterScaled(own, all, {}, "reduce")));
    return ExpectEqual(own,
                       SumOfRanks(part->world_size(), whole, at::kFloat)
                           .narrow(0, part->rank() * kNumel, kNumel),
                       "sum of a part");
  }));
}

TEST_P(NcclCommunicatorTest, OperationsComeToAnEndAfterTheirCommunicator) {
  constexpr int64_t kLarge = 1 << 24;
  const int world_size = GetParam();
  std::vector<at::Tensor> sums(world_size);
  NcclOptions options;
  options.timeout = absl::Seconds(30);
  absl::StatusOr<Group> group = CreateNcclGroup(world_size, options);
  ASSERT_OK(group);
  EXPECT_OK(AllOk(RunRanks(*group, [&](Communicator& comm) -> absl::Status {
    const c10::cuda::CUDAGuard guard(
        static_cast<c10::DeviceIndex>(comm.rank()));
    at::Tensor& sum = sums[comm.rank()];
    sum = at::zeros({kLarge}, OnGpu());
    for (int i = 0; i < 100; ++i) sum.add_(1);  // keeps the device busy
    FSDP_ASSIGN_OR_RETURN(auto work,
                          comm.AllReduce(sum, ReduceOp::kSum, "last"));
    return work->BlockCurrentStream();
  })));
  group->clear();
  for (const at::Tensor& sum : sums) {
    EXPECT_TRUE(at::equal(sum, at::full_like(sum, 100.0 * world_size)));
  }
}

// A graph's launch is collective, as the operations in it are.
TEST_P(NcclCommunicatorTest, CapturedOperationsRunWithTheirGraph) {
  constexpr int64_t kNumel = 1 << 16;
  EXPECT_OK(RunOnGpus(GetParam(), [](Communicator& comm) -> absl::Status {
    const c10::cuda::CUDAStreamGuard on_side(c10::cuda::getStreamFromPool());
    const int64_t whole = kNumel * comm.world_size();
    const at::Tensor in = at::full({kNumel}, comm.rank() + 1, OnGpu());
    const at::Tensor all = at::zeros({whole}, OnGpu());
    const at::Tensor sum = at::zeros({kNumel}, OnGpu());
    const auto step = [&]() -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(auto gather, comm.AllGather(all, in, "gather"));
      FSDP_RETURN_IF_ERROR(gather->BlockCurrentStream());
      FSDP_ASSIGN_OR_RETURN(
          auto reduce, comm.ReduceScatterScaled(sum, all, {0.5, true}, "sum"));
      return reduce->BlockCurrentStream();
    };
    FSDP_RETURN_IF_ERROR(step());  // connects the ranks
    at::cuda::CUDAGraph graph;
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    const absl::Status captured = step();
    graph.capture_end();
    FSDP_RETURN_IF_ERROR(captured);
    for (int i = 0; i < 3; ++i) graph.replay();
    in.fill_(0);
    graph.replay();
    FSDP_RETURN_IF_ERROR(Finish(comm.AllReduce(sum, ReduceOp::kMax, "after")));
    return ExpectEqual(
        sum,
        at::full({kNumel}, 4 * 0.5 * comm.world_size() * comm.world_size(),
                 OnGpu()),
        "replayed sums");
  }));
}

// The host waits inside NCCL for ranks that never connect.
TEST_P(NcclCommunicatorTest, AFirstOperationWithoutPeersMissesItsDeadline) {
  if (GetParam() == 1) GTEST_SKIP() << "needs a peer";
  NcclOptions options;
  options.timeout = absl::Seconds(2);
  absl::StatusOr<Group> group = CreateNcclGroup(GetParam(), options);
  ASSERT_OK(group);
  const at::Tensor grads = at::zeros({1 << 20}, OnGpu());
  EXPECT_THAT(Finish((*group)[0]->AllReduce(grads, ReduceOp::kSum, "grads")),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("all-reduce #0 of grads on rank 0 of ")));
}

TEST_P(NcclCommunicatorTest, AnAbortReachesEveryRank) {
  NcclOptions options;
  options.timeout = absl::Seconds(30);
  absl::StatusOr<Group> group = CreateNcclGroup(GetParam(), options);
  ASSERT_OK(group);
  (*group)[0]->Abort(absl::ResourceExhaustedError("disk full"));
  (*group)[0]->Abort(absl::InternalError("a second reason"));
  for (const auto& comm : *group) {
    const c10::cuda::CUDAGuard guard(
        static_cast<c10::DeviceIndex>(comm->rank()));
    const at::Tensor grads = at::zeros({4}, OnGpu());
    EXPECT_THAT(Finish(comm->AllReduce(grads, ReduceOp::kSum, "grads")),
                StatusIs(Code::kAborted,
                         AllOf(HasSubstr("rank 0 aborted: disk full"),
                               HasSubstr(absl::StrCat("all-reduce #0 of grads "
                                                      "on rank ",
                                                      comm->rank(), " of ")),
                               HasSubstr("float32 x 4, 16 bytes"))));
  }
}

TEST(NcclCommunicatorOneRankTest, RefusesOtherDevices) {
  EXPECT_OK(RunOnGpus(1, [](Communicator& comm) -> absl::Status {
    const at::Tensor cpu = at::zeros({4}, at::TensorOptions());
    const auto work = comm.AllReduce(cpu, ReduceOp::kSum, "w");
    FSDP_RETURN_IF_ERROR(CheckThat(work.status().code(), Code::kUnimplemented,
                                   "all-reduce of a CPU tensor"));
    return GatherOnce(comm, 3);
  }));
}

TEST(NcclCommunicatorOneRankTest, SymmetricMemoryMayGoInAnotherThread) {
  EXPECT_OK(RunOnGpus(1, [](Communicator& comm) -> absl::Status {
    for (int i = 0; i < 20; ++i) {
      FSDP_ASSIGN_OR_RETURN(at::Tensor memory, comm.AllocateSymmetric(4096));
      std::thread other([gone = std::move(memory)]() mutable { gone.reset(); });
      const absl::Status gathered = GatherOnce(comm, 1021);
      other.join();
      FSDP_RETURN_IF_ERROR(gathered);
    }
    return absl::OkStatus();
  }));
}

TEST(NcclCommunicatorOneRankTest, NamesTheRankThatDoesNotCome) {
  NcclOptions options;
  options.timeout = absl::Milliseconds(100);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(CreateNcclCommunicator(store, 0, 2, options),
              StatusIs(Code::kDeadlineExceeded,
                       AllOf(HasSubstr("rank 0 of 2"),
                             HasSubstr("rank 1 has not come"))));
}

TEST(NcclCommunicatorOneRankTest, ARankWithoutItsGpuTellsTheOthers) {
  NcclOptions options;
  options.timeout = absl::Seconds(20);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  NcclOptions absent = options;
  absent.device = NumDevices();
  EXPECT_THAT(CreateNcclCommunicator(store, 1, 2, absent),
              StatusIs(Code::kInvalidArgument, HasSubstr("there is no GPU")));
  EXPECT_THAT(
      CreateNcclCommunicator(store, 0, 2, options),
      StatusIs(Code::kInvalidArgument, HasSubstr("rank 1: there is no GPU")));
}

TEST(NcclCommunicatorOneRankTest, ARankThatStaysAwayFromNcclIsGivenUp) {
  NcclOptions options;
  options.timeout = absl::Seconds(2);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("nccl_id/1", std::vector<uint8_t>());
  EXPECT_THAT(CreateNcclCommunicator(store, 0, 2, options),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("join an NCCL group as rank 0 of 2")));
}

}  // namespace
}  // namespace fsdp::comm::testing
