#include "comm/shared_memory/shared_memory_communicator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/testing/check_that.h"
#include "base/testing/compare_tensors.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::CheckTensor;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

INSTANTIATE_TEST_SUITE_P(SharedMemory, CommunicatorContract,
                         ::testing::Values(ContractBackend{
                             "shared_memory",
                             [](int world_size, absl::Duration timeout) {
                               return CreateSharedMemoryGroup(world_size,
                                                              timeout);
                             }}),
                         BackendName);

Group Create(int world_size, absl::Duration timeout = absl::Seconds(30)) {
  return CreateSharedMemoryGroup(world_size, timeout).value();
}

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

absl::StatusOr<at::Tensor> Symmetric(Communicator& comm, int64_t numel) {
  FSDP_ASSIGN_OR_RETURN(at::Tensor bytes,
                        comm.AllocateSymmetric(numel * sizeof(float)));
  return bytes.view(at::kFloat);
}

// Returns numbers small enough for exact sums.
at::Tensor Numbers(int64_t begin, int64_t end) {
  return at::arange(begin, end).remainder(1000);
}

// The peer's memory is out of reach, as if it had just died. The cause is what
// the peer has said, not that others notice.
TEST(SharedMemoryTest, WhoCannotReadAPeersMemoryAsksWhyFirst) {
  const Group group = Create(2);
  const at::Tensor in = Symmetric(*group[1], 4).value().fill_(1);
  auto posted = group[1]->AllGather(at::empty({8}), in, "grads");
  ASSERT_OK(posted);
  const ::fsdp::testing::ResourceLimit no_files(RLIMIT_NOFILE, 0);
  auto work = group[0]->AllGather(at::empty({8}), at::empty({4}), "grads");
  ASSERT_OK(work);
  group[1]->Abort(absl::InternalError("the disk is full"));
  EXPECT_THAT(
      (*work)->Wait(Soon()),
      StatusIs(Code::kAborted, HasSubstr("rank 1 aborted: the disk is full")));
}

// Is larger than what is staged at once, and prime.
constexpr int64_t kLarge = 1'300'021;

TEST(SharedMemoryTest, SomeRanksMayHaveSymmetricMemoryAndOthersNot) {
  for (const bool all_have : {false, true}) {
    const auto run = [&](Communicator& comm) -> absl::Status {
      constexpr int64_t kN = 700'001;
      at::Tensor in = at::empty({kN * 3});
      if (all_have || comm.rank() == 1) {
        FSDP_ASSIGN_OR_RETURN(in, Symmetric(comm, kN * 3));
      }
      in.copy_(Numbers(0, kN * 3) + comm.rank());
      const at::Tensor out = at::empty({kN});
      FSDP_RETURN_IF_ERROR(
          Finish(comm.ReduceScatter(out, in, ReduceOp::kMax, "mixed")));
      FSDP_RETURN_IF_ERROR(Finish(
          comm.ReduceScatterScaled(out, in, {1, /*accumulate=*/true}, "sum")));
      const at::Tensor own =
          Numbers(comm.rank() * kN, (comm.rank() + 1) * kN).to(at::kFloat);
      return CheckTensor(out, (own + 2) + (3 * own + 3));
    };
    EXPECT_OK(AllOk(RunRanks(Create(3), run))) << all_have;
  }
}

TEST(SharedMemoryTest, AResultIsThereBeforeThePeersHaveTakenTheirs) {
  const Group group = Create(2);
  std::vector<at::Tensor> in;
  std::vector<std::unique_ptr<Work>> works;
  for (int rank : {0, 1}) {
    in.push_back(Symmetric(*group[rank], 8).value());
    in[rank].fill_(rank + 1);
    works.push_back(
        group[rank]
            ->ReduceScatter(in[rank].narrow(0, int64_t{4} * rank, 4), in[rank],
                            ReduceOp::kSum, "early")
            .value());
  }
  // Rank 0 has started first, so its part is not computed yet.
  EXPECT_OK(works[1]->WaitForResult(Soon()));
  EXPECT_TRUE(at::equal(in[1].narrow(0, 4, 4), at::full({4}, 3.0f)));
  EXPECT_THAT(works[1]->Wait(absl::Now() + absl::Milliseconds(20)),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("rank 0 (last seen in reduce-scatter #0")));
}

// Returns how many ranges of this process's addresses are shared memory of
// ours.
int CountMappings() {
  int count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (absl::StrContains(line, "memfd:libtorch_fsdp")) ++count;
  }
  return count;
}

TEST(SharedMemoryTest, MemoryThatIsFreedIsForgottenByThePeers) {
  constexpr int kRounds = 20;
  const auto run = [](Communicator& comm) -> absl::Status {
    const int before = CountMappings();
    for (int round = 0; round < kRounds; ++round) {
      FSDP_ASSIGN_OR_RETURN(at::Tensor in, Symmetric(comm, 600'000));
      in.fill_(round);
      const at::Tensor out = at::empty({1'200'000});
      FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(out, in, "round")));
      FSDP_RETURN_IF_ERROR(
          CheckTensor(out, at::full({1'200'000}, static_cast<float>(round))));
    }
    return CheckThat(CountMappings() - before, ::testing::Lt(kRounds / 2),
                     "new mappings");
  };
  EXPECT_OK(AllOk(RunRanks(Create(2), run)));
}

TEST(SharedMemoryTest, MemoryThatIsDroppedStaysUntilThePeersHaveReadIt) {
  const Group group = Create(2);
  std::vector<std::unique_ptr<Work>> works;
  std::vector<at::Tensor> outs;
  for (int rank : {1, 0}) {
    at::Tensor in = Symmetric(*group[rank], 8).value();
    in.fill_(rank + 1);
    outs.push_back(at::zeros({4}));
    works.push_back(
        group[rank]
            ->ReduceScatter(outs.back(), in, ReduceOp::kSum, "early")
            .value());
    // Rank 0 is done at once, and its memory goes at the end of this scope.
    if (rank == 0) {
      EXPECT_OK(works.back()->WaitForResult(Soon()));
    }
  }
  works.pop_back();
  EXPECT_OK(works[0]->Wait(Soon()));
  EXPECT_TRUE(at::equal(outs[0], at::full({4}, 3.0f)));
}

TEST(SharedMemoryTest, WhatAllHaveStartedIsDoneAlthoughAPeerThenAborts) {
  const Group group = Create(2);
  const at::Tensor sum = at::ones({4});
  auto own = group[0]->AllReduce(sum, ReduceOp::kSum, "sum");
  EXPECT_OK(Finish(group[1]->AllReduce(at::ones({4}), ReduceOp::kSum, "sum")));
  group[1]->Abort(absl::InternalError("later"));
  EXPECT_OK(Finish(std::move(own)));
  EXPECT_TRUE(at::equal(sum, at::full({4}, 2.0f)));
}

TEST(SharedMemoryTest, WaitingInOneGroupMovesTheDataOfOthers) {
  // Neither rank could finish if it only looked at the group in which it waits.
  const auto run = [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto other, comm.Split(0, 0));
    const at::Tensor a = at::full({kLarge}, 1.0f);
    const at::Tensor b = at::full({kLarge}, 2.0f);
    FSDP_ASSIGN_OR_RETURN(auto in_this,
                          comm.AllReduce(a, ReduceOp::kSum, "this"));
    FSDP_ASSIGN_OR_RETURN(auto in_other,
                          other->AllReduce(b, ReduceOp::kSum, "other"));
    Work& first = comm.rank() == 0 ? *in_this : *in_other;
    Work& second = comm.rank() == 0 ? *in_other : *in_this;
    FSDP_RETURN_IF_ERROR(first.Wait(Soon()));
    FSDP_RETURN_IF_ERROR(second.Wait(Soon()));
    FSDP_RETURN_IF_ERROR(CheckTensor(a, at::full({kLarge}, 2.0f)));
    return CheckTensor(b, at::full({kLarge}, 4.0f));
  };
  EXPECT_OK(AllOk(RunRanks(Create(2), run)));
}

TEST(SharedMemoryTest, ManyCallsAheadOfThePeers) {
  const auto run = [](Communicator& comm) -> absl::Status {
    std::vector<at::Tensor> tensors;
    std::vector<std::unique_ptr<Work>> works;
    for (int i = 0; i < 300; ++i) {
      tensors.push_back(at::full({3}, static_cast<float>(i)));
      FSDP_ASSIGN_OR_RETURN(
          works.emplace_back(),
          comm.AllReduce(tensors.back(), ReduceOp::kSum, "many"));
    }
    for (int i = 299; i >= 0; --i) {
      FSDP_RETURN_IF_ERROR(works[i]->Wait(Soon()));
      FSDP_RETURN_IF_ERROR(
          CheckTensor(tensors[i], at::full({3}, static_cast<float>(3 * i))));
    }
    return absl::OkStatus();
  };
  EXPECT_OK(AllOk(RunRanks(Create(3), run)));
}

TEST(SharedMemoryTest, CommonMemoryIsTheSameOnAllRanks) {
  EXPECT_OK(AllOk(RunRanks(Create(3), [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(CommonMemory common, comm.AllocateCommon(12));
    const auto pass = [&] {
      common.fence->Arrive();
      return common.fence->Wait(Soon());
    };
    const at::Tensor whole = common.memory.view(at::kFloat);
    for (int round = 0; round < 3; ++round) {
      FSDP_RETURN_IF_ERROR(
          CheckTensor(whole, at::full({3}, static_cast<float>(round))));
      FSDP_RETURN_IF_ERROR(pass());  // nobody reads what is overwritten
      whole[comm.rank()] = round + 1;
      FSDP_RETURN_IF_ERROR(pass());
    }
    return absl::OkStatus();
  })));
}

TEST(SharedMemoryTest, CommonMemoryFailsOnAllRanksAlike) {
  const auto run = [](Communicator& comm) -> absl::Status {
    const absl::Status negative = comm.AllocateCommon(-1).status();
    const absl::Status huge = comm.AllocateCommon(int64_t{1} << 50).status();
    if (negative.code() != Code::kInvalidArgument ||
        huge.code() != Code::kResourceExhausted) {
      return absl::InternalError(
          absl::StrCat(negative.ToString(), huge.ToString()));
    }
    return Finish(comm.AllReduce(at::zeros({1}), ReduceOp::kSum, "goes on"));
  };
  EXPECT_OK(AllOk(RunRanks(Create(3), run)));
}

TEST(SharedMemoryTest, AFenceWaitsForEveryRankAsOftenAsThisHasArrived) {
  const Group group = Create(2);
  std::vector<CommonMemory> common(2);
  const auto allocate = [&](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(common[comm.rank()], comm.AllocateCommon(8));
    return absl::OkStatus();
  };
  ASSERT_OK(AllOk(RunRanks(group, allocate)));
  EXPECT_OK(common[0].fence->Wait(absl::Now()));  // never arrived
  common[0].fence->Arrive();
  common[1].fence->Arrive();
  common[1].fence->Arrive();
  EXPECT_OK(common[0].fence->Wait(absl::Now()));
  EXPECT_THAT(common[1].fence->Wait(absl::Now() + absl::Milliseconds(20)),
              StatusIs(Code::kDeadlineExceeded,
                       ::testing::AllOf(HasSubstr("fence #2 on rank 1 of 2"),
                                        HasSubstr("rank 0"))));
  // The missed deadline has ended the group.
  common[0].fence->Arrive();
  common[0].fence->Arrive();
  EXPECT_THAT(common[0].fence->Wait(Soon()),
              StatusIs(Code::kAborted, HasSubstr("rank 1 gave up")));
}

TEST(SharedMemoryTest, TensorsOutliveTheirCommunicators) {
  Group group = Create(2);
  at::Tensor symmetric = Symmetric(*group[0], 1000).value();
  CommonMemory common;
  const auto allocate = [&](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(CommonMemory own, comm.AllocateCommon(8));
    if (comm.rank() == 1) common = std::move(own);
    return absl::OkStatus();
  };
  ASSERT_OK(AllOk(RunRanks(group, allocate)));
  group.clear();
  symmetric.fill_(1);
  common.memory.fill_(1);
  EXPECT_EQ(symmetric.sum().item<float>(), 1000);
}

TEST(SharedMemoryTest, NamesARankThatDoesNotCome) {
  SharedMemoryOptions options;
  options.timeout = absl::Milliseconds(50);
  EXPECT_THAT(
      CreateSharedMemoryCommunicator(c10::make_intrusive<c10d::HashStore>(), 0,
                                     2, options),
      StatusIs(Code::kDeadlineExceeded, HasSubstr("rank 1 has not come")));
}

TEST(SharedMemoryTest, ARankWithoutMemoryTellsTheOthers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  SharedMemoryOptions options;
  options.timeout = absl::Seconds(20);
  absl::Status waits;
  std::thread other([&] {
    waits = CreateSharedMemoryCommunicator(store, 0, 2, options).status();
  });
  // Rank 0 has its memory before there is none for rank 1.
  store->set("hosts/1", store->get("hosts/0"));
  store->wait({"segments/0"});
  absl::Status own;
  {
    const ::fsdp::testing::ResourceLimit none(RLIMIT_FSIZE, 0);
    own = CreateSharedMemoryCommunicator(store, 1, 2, options).status();
  }
  other.join();
  EXPECT_THAT(own, StatusIs(Code::kResourceExhausted,
                            ::testing::StartsWith("allocate ")));
  EXPECT_THAT(waits, StatusIs(Code::kResourceExhausted,
                              ::testing::StartsWith("rank 1: allocate ")));
}

// Counts the open files that have a size and no name.
int NumMemoryFiles() {
  int count = 0;
  for (int descriptor = 0; descriptor < 1000; ++descriptor) {
    struct stat status;
    count += fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) &&
             status.st_nlink == 0 && status.st_size > 0;
  }
  return count;
}

TEST(SharedMemoryTest, WhereOneHasNoMemoryForAPartNobodyGetsIt) {
  const Group group = Create(2);
  const int before = NumMemoryFiles();
  std::vector<absl::Status> refusals(2);
  RunRanks(group, [&](Communicator& comm) {
    std::optional<::fsdp::testing::ResourceLimit> none;
    if (comm.rank() == 1) {
      // Rank 0 has its memory before there is none for this one.
      const absl::Time deadline = absl::Now() + absl::Seconds(20);
      while (NumMemoryFiles() == before && absl::Now() < deadline) {
        poll(nullptr, 0, 1);
      }
      none.emplace(RLIMIT_FSIZE, 0);
    }
    refusals[comm.rank()] = comm.Split(0, 0).status();
    return absl::OkStatus();
  });
  EXPECT_THAT(refusals[0],
              StatusIs(Code::kResourceExhausted,
                       ::testing::StartsWith("rank 1: allocate ")));
  EXPECT_THAT(refusals[1], StatusIs(Code::kResourceExhausted,
                                    ::testing::StartsWith("allocate ")));
  EXPECT_OK(AllOk(RunRanks(group, [](Communicator& comm) {
    return Finish(comm.AllReduce(at::zeros({1}), ReduceOp::kSum, "goes on"));
  })));
}

// A rank whose descriptors the others do not see cannot be joined.
TEST(SharedMemoryTest, WhereOneCannotOpenAPartNobodyGetsIt) {
  const Group group = Create(3);
  std::vector<absl::Status> refusals(3);
  EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& comm) {
    if (comm.rank() == 1 && unshare(CLONE_FILES) != 0) {
      return absl::InternalError("unshare");
    }
    refusals[comm.rank()] = comm.Split(comm.rank() / 2, 0).status();
    return Finish(comm.AllReduce(at::zeros({1}), ReduceOp::kSum, "goes on"));
  })));
  EXPECT_THAT(refusals[0],
              StatusIs(Code::kUnavailable, ::testing::StartsWith("open ")));
  for (const int rank : {1, 2}) {
    EXPECT_THAT(
        refusals[rank],
        StatusIs(Code::kUnavailable, ::testing::StartsWith("rank 0: open ")));
  }
}

auto NumOpenDescriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

TEST(SharedMemoryTest, GroupsLeaveNothingOpen) {
  const auto use = [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto part, comm.Split(0, 0));
    FSDP_ASSIGN_OR_RETURN(CommonMemory common, part->AllocateCommon(10));
    FSDP_ASSIGN_OR_RETURN(at::Tensor in, Symmetric(*part, 5));
    return Finish(part->AllGather(at::zeros({15}), in, "gather"));
  };
  ASSERT_OK(AllOk(RunRanks(Create(3), use)));
  const int before = NumOpenDescriptors();
  for (int i = 0; i < 3; ++i) ASSERT_OK(AllOk(RunRanks(Create(3), use)));
  EXPECT_EQ(NumOpenDescriptors(), before);
}

}  // namespace
}  // namespace fsdp::comm::testing
