#include "comm/hierarchical/hierarchical_communicator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/compare_tensors.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/hierarchical/host_layout.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::CheckTensor;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

absl::StatusOr<Group> CreateLocal(int world_size, absl::Duration timeout,
                                  std::vector<int> world_ranks) {
  return CreateLocalGroup(world_size, {timeout, std::move(world_ranks)});
}

HostLayout Layout(int num_hosts, int ranks_per_host) {
  HostLayout layout;
  layout.num_hosts = num_hosts;
  layout.ranks_per_host = ranks_per_host;
  return layout;
}

// Returns a layout with as many ranks per host as divide the world,
// `ranks_per_host` at most. A world of two is two hosts.
HostLayout LayoutOf(int world_size, int ranks_per_host) {
  while (world_size % ranks_per_host != 0 || ranks_per_host == world_size) {
    if (ranks_per_host == 1) break;
    ranks_per_host /= 2;
  }
  return Layout(world_size / ranks_per_host, ranks_per_host);
}

ContractBackend Backend(std::string name, int ranks_per_host,
                        const GroupFactory& inside,
                        const GroupFactory& between) {
  ContractBackend backend;
  backend.name = std::move(name);
  backend.create = [=](int world_size, absl::Duration timeout) {
    return CreateHierarchicalGroup(LayoutOf(world_size, ranks_per_host), inside,
                                   between, timeout);
  };
  backend.sums_in_rank_order = false;
  return backend;
}

INSTANTIATE_TEST_SUITE_P(
    Hierarchical, CommunicatorContract,
    ::testing::Values(
        Backend("hosts_of_two", 2, CreateLocal, CreateLocal),
        Backend("hosts_of_four", 4, CreateLocal, CreateLocal),
        Backend("hosts_of_one", 1, CreateSharedMemoryGroup, CreateLocal),
        // With one host only, all is inside.
        ContractBackend{"one_host",
                        [](int world_size, absl::Duration timeout) {
                          return CreateHierarchicalGroup(Layout(1, world_size),
                                                         CreateLocal,
                                                         CreateLocal, timeout);
                        },
                        /*sums_in_rank_order=*/true},
        Backend("shared_memory_and_gloo", 4, CreateSharedMemoryGroup,
                CreateGlooGroup)),
    BackendName);

// Two hosts with two ranks each.
Group Create(absl::Duration timeout = absl::Seconds(30)) {
  return CreateHierarchicalGroup(Layout(2, 2), CreateLocal, CreateLocal,
                                 timeout)
      .value();
}

StartedWork StartSum(Communicator& comm, absl::string_view label) {
  return comm.AllReduce(at::zeros({4}), ReduceOp::kSum, label);
}

// Is larger than what goes whole over every rail, and prime.
constexpr int64_t kLarge = 100'003;

at::Tensor Numbers(int64_t size) { return at::arange(size).remainder(1000); }

TEST(HierarchicalTest, LargeTensorsGoInSlices) {
  for (const HostLayout layout : {Layout(2, 2), Layout(2, 3), Layout(3, 2)}) {
    const int world_size = layout.num_hosts * layout.ranks_per_host;
    const auto run = [&](Communicator& comm) -> absl::Status {
      for (int root = 0; root < world_size; ++root) {
        const at::Tensor tensor = Numbers(kLarge) + comm.rank();
        FSDP_RETURN_IF_ERROR(Finish(comm.Broadcast(tensor, root, "b")));
        FSDP_RETURN_IF_ERROR(CheckTensor(tensor, Numbers(kLarge) + root));
      }
      // One size is a multiple of the ranks of a host, the other is not.
      for (int64_t size : {int64_t{6} * 20'011, kLarge}) {
        const at::Tensor tensor = Numbers(size) + comm.rank();
        FSDP_RETURN_IF_ERROR(
            Finish(comm.AllReduce(tensor, ReduceOp::kSum, "r")));
        FSDP_RETURN_IF_ERROR(CheckTensor(
            tensor,
            Numbers(size) * world_size + world_size * (world_size - 1) / 2));
      }
      return absl::OkStatus();
    };
    const auto group =
        CreateHierarchicalGroup(layout, CreateLocal, CreateLocal);
    ASSERT_OK(group);
    EXPECT_OK(AllOk(RunRanks(*group, run))) << world_size;
  }
}

std::unique_ptr<Communicator> LocalPart(int size, int rank,
                                        std::vector<int> world_ranks) {
  LocalGroupOptions options;
  options.world_ranks = std::move(world_ranks);
  return std::move(CreateLocalGroup(size, options).value()[rank]);
}

TEST(HierarchicalTest, IsMadeOfPartsThatFit) {
  const auto make = [](int network_rank, int network_size) {
    HierarchicalParts parts;
    parts.host = LocalPart(2, 1, {4, 5});
    parts.rail = LocalPart(3, 2, {1, 3, 5});
    parts.network =
        std::move(CreateLocalGroup(network_size).value()[network_rank]);
    return CreateHierarchicalCommunicator(std::move(parts)).status();
  };
  EXPECT_OK(make(5, 6));
  EXPECT_DEATH(make(4, 6).IgnoreError(), "network.rank");
  EXPECT_DEATH(make(5, 7).IgnoreError(), "network.world_size");
}

TEST(HierarchicalTest, SaysWhatItIsMadeOf) {
  EXPECT_EQ(
      Create()[3]->ToString(),
      "hierarchical (local inside 2 hosts, local between them), rank 3 of "
      "4");
}

// Returns the ranks of a new group by their old numbers.
absl::StatusOr<std::vector<int64_t>> RanksOf(Communicator& part, int own) {
  const at::Tensor out = at::empty({part.world_size()}, at::kLong);
  FSDP_RETURN_IF_ERROR(
      Finish(part.AllGather(out, at::full({1}, own, at::kLong), "members")));
  const auto* data = static_cast<const int64_t*>(out.const_data_ptr());
  return std::vector<int64_t>(data, data + out.numel());
}

struct SplitCase {
  std::string kind;  // begin of the parts' ToString()
  std::function<int(int)> color;
  std::function<int(int)> key;
  std::vector<std::vector<int64_t>> members;  // by color
};

TEST(HierarchicalTest, SplitsIntoGroupsOfEachKind) {
  const auto by_rank = [](int rank) { return rank; };
  const std::vector<SplitCase> cases = {
      {"shared memory",
       [](int rank) { return rank / 2; },
       [](int rank) { return -rank; },
       {{1, 0}, {3, 2}, {5, 4}, {7, 6}}},
      {"gloo",
       [](int rank) { return rank % 4; },
       by_rank,
       {{0, 4}, {1, 5}, {2, 6}, {3, 7}}},
      {"hierarchical",
       [](int rank) { return rank / 2 % 2; },
       [](int rank) { return -rank; },
       {{5, 4, 1, 0}, {7, 6, 3, 2}}},
      {"gloo",
       [](int rank) { return rank % 2; },
       [](int rank) { return rank % 4; },
       {{0, 4, 2, 6}, {1, 5, 3, 7}}},
  };
  const auto group = CreateHierarchicalGroup(
      Layout(2, 4), CreateSharedMemoryGroup, CreateGlooGroup);
  ASSERT_OK(group);
  for (const SplitCase& split : cases) {
    const auto run = [&](Communicator& comm) -> absl::Status {
      const int color = split.color(comm.rank());
      FSDP_ASSIGN_OR_RETURN(const auto part,
                            comm.Split(color, split.key(comm.rank())));
      FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> members,
                            RanksOf(*part, comm.rank()));
      if (members != split.members[color] ||
          part->ToString().find(split.kind) != 0) {
        return absl::InternalError(part->ToString());
      }
      return Finish(StartSum(comm, "goes on"));
    };
    EXPECT_OK(AllOk(RunRanks(*group, run))) << split.kind;
  }
}

TEST(HierarchicalTest, AHierarchicalPartCanBeSplitAgain) {
  const auto run = [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto half, comm.Split(comm.rank() / 8, 0));
    FSDP_ASSIGN_OR_RETURN(const auto pair, half->Split(half->rank() % 4, 0));
    FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> members,
                          RanksOf(*pair, comm.rank()));
    const int64_t first = comm.rank() / 8 * 8 + comm.rank() % 4;
    if (members == std::vector<int64_t>{first, first + 4}) {
      return absl::OkStatus();
    }
    return absl::InternalError(pair->ToString());
  };
  const auto group =
      CreateHierarchicalGroup(Layout(4, 4), CreateLocal, CreateLocal);
  ASSERT_OK(group);
  EXPECT_OK(AllOk(RunRanks(*group, run)));
}

// Rank 3 makes no call: rank 2 lacks it inside the host, rank 1 between hosts,
// rank 0 both of them.
TEST(HierarchicalTest, AFailureInOnePartReachesAllRanks) {
  const Group group = Create();
  std::vector<StartedWork> works;
  for (int rank : {0, 1, 2}) works.push_back(StartSum(*group[rank], "grads"));
  EXPECT_THAT(
      (*works[2])->Wait(absl::Now() + absl::Milliseconds(50)),
      StatusIs(Code::kDeadlineExceeded,
               AllOf(HasSubstr("all-reduce #0 of grads on rank 2 of 4"),
                     HasSubstr("on rank 0 of 2 (world rank 2): "),
                     HasSubstr("still missing: rank 1 (world rank 3) (no call "
                               "so far)"))));
  for (int rank : {0, 1}) {
    EXPECT_THAT(Finish(std::move(works[rank])),
                StatusIs(Code::kAborted,
                         AllOf(HasSubstr(absl::StrCat("on rank ", rank)),
                               HasSubstr("rank 2 gave up waiting"))));
  }
  // From its host, where that is rank 0, or from all, whichever it hears first.
  EXPECT_THAT(Finish(StartSum(*group[3], "grads")),
              StatusIs(Code::kAborted,
                       ::testing::ContainsRegex("rank 2[)]? gave up waiting")));
}

TEST(HierarchicalTest, WithoutThreadsThereIsNone) {
  const ::fsdp::testing::NoThreads none;
  EXPECT_THAT(CreateHierarchicalGroup(Layout(2, 1), CreateLocal, CreateLocal),
              StatusIs(Code::kResourceExhausted, HasSubstr("ulimit -u")));
}

TEST(HierarchicalTest, AnAbortReachesTheRankThatSharesNoPart) {
  const Group group = Create();
  // A split goes over the network, which has to be free for it.
  const auto split = [](Communicator& comm) {
    return comm.Split(0, comm.rank() % 2).status();
  };
  ASSERT_OK(AllOk(RunRanks(group, split)));
  auto far = StartSum(*group[3], "grads");
  auto near = StartSum(*group[1], "grads");
  group[0]->Abort(absl::ResourceExhaustedError("disk full"));
  for (auto* work : {&near, &far}) {
    EXPECT_THAT(
        Finish(std::move(*work)),
        StatusIs(Code::kAborted, HasSubstr(": rank 0 aborted: disk full")));
  }
}

TEST(HierarchicalTest, ARankThatLeavesInTheMiddleIsNamed) {
  Group group = Create();
  std::vector<StartedWork> works;
  for (int rank : {0, 3}) works.push_back(StartSum(*group[rank], "grads"));
  group[3].reset();
  for (int rank : {1, 2}) works.push_back(StartSum(*group[rank], "grads"));
  for (int i : {0, 2, 3}) {
    EXPECT_THAT(Finish(std::move(works[i])),
                StatusIs(Code::kUnavailable,
                         HasSubstr("rank 3 has left the group in all-reduce "
                                   "#0 of grads")));
  }
  EXPECT_THAT(
      Finish(std::move(works[1])),
      StatusIs(Code::kUnavailable, HasSubstr("this rank has left the group")));
}

struct Mismatch {
  std::string name;
  std::function<StartedWork(Communicator&)> odd;
};

// The calls of rank 3 differ from the others'.
TEST(HierarchicalTest, CallsThatDifferFailOnEveryRank) {
  const auto sum = [](int64_t size, ReduceOp op) {
    return [=](Communicator& comm) {
      return comm.AllReduce(at::zeros({size}), op, "w");
    };
  };
  const std::vector<Mismatch> mismatches = {
      {"reduction", sum(kLarge, ReduceOp::kMax)},
      {"count", sum(kLarge + 1, ReduceOp::kSum)},
      {"collective",
       [](Communicator& comm) {
         return comm.Broadcast(at::zeros({kLarge}), 0, "w");
       }},
      {"split",
       [](Communicator& comm) -> StartedWork {
         return comm.Split(0, 0).status();
       }},
  };
  for (const Mismatch& mismatch : mismatches) {
    const auto run = [&](Communicator& comm) {
      return Finish(comm.rank() == 3 ? mismatch.odd(comm)
                                     : sum(kLarge, ReduceOp::kSum)(comm));
    };
    EXPECT_THAT(RunRanks(Create(), run),
                Each(StatusIs(Code::kInvalidArgument, HasSubstr("differ"))))
        << mismatch.name;
  }
}

TEST(HierarchicalTest, HostsThatNameDifferentRootsOfOneHostFail) {
  const auto run = [](Communicator& comm) {
    return Finish(comm.Broadcast(at::zeros({4}), comm.rank() < 2 ? 0 : 1, "w"));
  };
  EXPECT_THAT(
      RunRanks(Create(), run),
      Each(StatusIs(Code::kInvalidArgument,
                    AllOf(HasSubstr("w, root 0"), HasSubstr("w, root 1")))));
}

TEST(HierarchicalTest, EndsInTheMiddleOfASplit) {
  Group group = Create(/*timeout=*/absl::Milliseconds(50));
  EXPECT_THAT(group[1]->Split(0, 0),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("split #0 of the group on rank 1 of 4")));
}

}  // namespace
}  // namespace fsdp::comm::testing
