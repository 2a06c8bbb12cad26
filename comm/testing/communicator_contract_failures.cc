// Tests what a Communicator does when something is wrong.
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"

namespace fsdp::comm::testing {
namespace {

constexpr char kOneThread[] = "one thread cannot call for several ranks";

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

at::Tensor Zeros(int64_t size, at::ScalarType dtype = at::kFloat) {
  return at::zeros({size}, ContractTensor(dtype));
}

StartedWork StartSum(Communicator& comm, absl::string_view label = "grads",
                     int64_t size = 4) {
  return comm.AllReduce(Zeros(size), ReduceOp::kSum, label);
}

TEST_P(CommunicatorContract, RefusesWrongArguments) {
  if (!OneThreadCanBe(2)) GTEST_SKIP() << kOneThread;
  const Group group = Create(2);
  Communicator& comm = *group[1];
  const auto invalid = [](absl::string_view text) {
    return StatusIs(
        Code::kInvalidArgument,
        AllOf(HasSubstr("of w on rank 1 of 2"), HasSubstr(std::string(text))));
  };
  const at::Tensor whole = Zeros(8);
  EXPECT_THAT(comm.AllGather(whole, Zeros(3), "w"),
              invalid("needs 2 times the elements"));
  EXPECT_THAT(comm.ReduceScatter(Zeros(3), whole, ReduceOp::kSum, "w"),
              invalid("shape [3]"));
  EXPECT_THAT(comm.AllGather(whole, Zeros(4, at::kDouble), "w"),
              invalid("differ in dtype"));
  EXPECT_THAT(comm.AllGather(whole, at::Tensor(), "w"), invalid("undefined"));
  EXPECT_THAT(comm.AllGather(whole.view({2, 4}), Zeros(4), "w"),
              invalid("one dimension"));
  EXPECT_THAT(comm.AllToAll(whole, Zeros(6), "w"),
              invalid("the same number of elements"));
  EXPECT_THAT(comm.AllToAll(Zeros(7), Zeros(7), "w"),
              invalid("2 times what goes to each rank"));
  EXPECT_THAT(comm.AllToAll(whole, Zeros(8, at::kInt), "w"),
              invalid("differ in dtype"));
  EXPECT_THAT(comm.AllReduce(whole.slice(0, 0, 8, 2), ReduceOp::kSum, "w"),
              invalid("contiguous"));
  EXPECT_THAT(comm.Broadcast(whole, 2, "w"), invalid("no rank 2"));
  EXPECT_THAT(comm.Broadcast(whole, -1, "w"), invalid("no rank -1"));
  for (int64_t begin : {0, 3}) {
    const at::Tensor part = whole.narrow(0, begin, 4);
    EXPECT_THAT(comm.AllGather(whole, part, "w"),
                invalid("only rank 1's own slice"));
    EXPECT_THAT(comm.ReduceScatter(part, whole, ReduceOp::kSum, "w"),
                invalid("only rank 1's own slice"));
  }
  EXPECT_THAT(comm.AllToAll(whole.narrow(0, 0, 6), whole.narrow(0, 2, 6), "w"),
              invalid("overlap"));
  EXPECT_THAT(comm.ReduceScatterScaled(whole.narrow(0, 4, 4), whole, {}, "w"),
              invalid("overlap"));
  EXPECT_THAT(comm.ReduceScatterScaled(Zeros(4, at::kInt), whole, {}, "w"),
              invalid("floating-point"));
  EXPECT_THAT(comm.ReduceScatterScaled(Zeros(3), whole, {}, "w"),
              invalid("needs 2 times the elements"));
}

TEST_P(CommunicatorContract, RefusesOtherDtypesAndANegativeColor) {
  const Group group = Create(1);
  for (at::ScalarType dtype :
       {at::kBool, at::kShort, at::kChar, at::kComplexFloat}) {
    EXPECT_THAT(
        group[0]->AllReduce(Zeros(4, dtype), ReduceOp::kSum, "w"),
        StatusIs(Code::kUnimplemented, HasSubstr("not one of float32")));
  }
  EXPECT_THAT(group[0]->Split(-1, 0),
              StatusIs(Code::kInvalidArgument, HasSubstr("-1")));
}

TEST_P(CommunicatorContract, WrongArgumentsDoNotTakeAPlaceInTheOrder) {
  if (!OneThreadCanBe(2)) GTEST_SKIP() << kOneThread;
  const Group group = Create(2);
  EXPECT_FALSE(group[0]->Broadcast(Zeros(1), 7, "w").ok());
  auto a = StartSum(*group[0]);
  auto b = StartSum(*group[1]);
  EXPECT_OK(Finish(std::move(a)));
  EXPECT_OK(Finish(std::move(b)));
}

TEST_P(CommunicatorContract, MissedDeadlineEndsTheGroup) {
  if (!OneThreadCanBe(3)) GTEST_SKIP() << kOneThread;
  const Group group = Create(3);
  auto work = StartSum(*group[0], "blocks.2");
  auto other = StartSum(*group[1], "blocks.2");
  ASSERT_OK(work);
  const absl::Status missed =
      (*work)->Wait(absl::Now() + absl::Milliseconds(50));
  EXPECT_THAT(missed, StatusIs(Code::kDeadlineExceeded,
                               AllOf(HasSubstr("all-reduce"),
                                     HasSubstr("blocks.2 on rank 0 of 3"),
                                     HasSubstr("rank 2"))));
  EXPECT_EQ((*work)->Wait(absl::Now()), missed);
  EXPECT_FALSE(StartSum(*group[0]).ok());
  // The peers end too, and know why.
  EXPECT_THAT(Finish(std::move(other)),
              StatusIs(Code::kAborted, HasSubstr("rank 0")));
  EXPECT_THAT(Finish(StartSum(*group[2])),
              StatusIs(Code::kAborted, HasSubstr("rank 0")));
}

// This holds whoever gives up first, and whether or not the others have heard
// of it.
TEST_P(CommunicatorContract, MemoryOfWhoHasGivenUpIsItsOwn) {
  if (!OneThreadCanBe(3)) GTEST_SKIP() << kOneThread;
  const Group group = Create(3);
  const absl::Time deadline = absl::Now() + absl::Milliseconds(50);
  std::vector<at::Tensor> tensors;
  std::vector<std::unique_ptr<Work>> works;
  for (int rank : {0, 1}) {
    tensors.push_back(Zeros(4));
    ASSERT_OK_AND_ASSIGN(
        works.emplace_back(),
        group[rank]->AllReduce(tensors[rank], ReduceOp::kSum, "grads"));
  }
  for (int rank : {0, 1}) {
    EXPECT_FALSE(works[rank]->Wait(deadline).ok()) << rank;
    works[rank].reset();
    tensors[rank].fill_(7);
  }
  EXPECT_FALSE(Finish(StartSum(*group[2])).ok());
  for (const at::Tensor& tensor : tensors) {
    EXPECT_TRUE((tensor == 7).all().item<bool>()) << tensor;
  }
}

TEST_P(CommunicatorContract, AbortFromAnotherThreadEndsEveryWait) {
  if (!OneThreadCanBe(3)) GTEST_SKIP() << kOneThread;
  const Group group = Create(3);
  auto own = StartSum(*group[1]);
  auto peers = StartSum(*group[0]);
  std::thread aborting([&] {
    group[1]->Abort(absl::ResourceExhaustedError("disk full"));
    group[1]->Abort(absl::InternalError("a second reason"));
  });
  const auto disk_full = StatusIs(
      Code::kAborted,
      AllOf(HasSubstr("rank 1 aborted: disk full"), HasSubstr("grads on")));
  EXPECT_THAT(Finish(std::move(peers)), disk_full);
  EXPECT_THAT(Finish(std::move(own)), disk_full);
  EXPECT_THAT(Finish(StartSum(*group[1])), disk_full);
  // Rank 2 was in no operation.
  EXPECT_THAT(Finish(StartSum(*group[2])), disk_full);
  aborting.join();
}

TEST_P(CommunicatorContract, AbortBeforeAnyCall) {
  if (!OneThreadCanBe(2)) GTEST_SKIP() << kOneThread;
  const Group group = Create(2);
  group[0]->Abort(absl::InternalError("never mind"));
  for (const auto& comm : group) {
    EXPECT_THAT(Finish(StartSum(*comm)),
                StatusIs(Code::kAborted, HasSubstr("never mind")));
  }
}

// Calls of ranks 0 and 1 that do not fit together.
struct Mismatch {
  std::string name;
  std::function<StartedWork(Communicator&)> calls[2];
};

std::vector<Mismatch> Mismatches() {
  const auto sum = [](int64_t size, at::ScalarType dtype, ReduceOp op,
                      const std::string& label) {
    return [=](Communicator& comm) {
      return comm.AllReduce(Zeros(size, dtype), op, label);
    };
  };
  const auto broadcast = [](int root) {
    return
        [=](Communicator& comm) { return comm.Broadcast(Zeros(6), root, "w"); };
  };
  const auto gather = [](Communicator& comm) {
    return comm.AllGather(Zeros(12), Zeros(6), "w");
  };
  const auto plain = sum(6, at::kFloat, ReduceOp::kSum, "w");
  return {
      {"collective", {plain, gather}},
      {"label", {plain, sum(6, at::kFloat, ReduceOp::kSum, "v")}},
      {"count", {plain, sum(600'000, at::kFloat, ReduceOp::kSum, "w")}},
      {"dtype", {plain, sum(6, at::kInt, ReduceOp::kSum, "w")}},
      {"reduction", {plain, sum(6, at::kFloat, ReduceOp::kMax, "w")}},
      {"root", {broadcast(0), broadcast(1)}},
  };
}

TEST_P(CommunicatorContract, CallsThatDifferFailOnEveryRank) {
  if (!OneThreadCanBe(2)) GTEST_SKIP() << kOneThread;
  for (const Mismatch& mismatch : Mismatches()) {
    if (!GetParam().compares_calls) continue;
    const Group group = Create(2);
    auto first = mismatch.calls[0](*group[0]);
    auto second = mismatch.calls[1](*group[1]);
    for (auto* work : {&first, &second}) {
      EXPECT_THAT(
          Finish(std::move(*work)),
          StatusIs(Code::kInvalidArgument,
                   AllOf(HasSubstr("calls #0 differ"),
                         HasSubstr("rank 0 called"), HasSubstr("rank 1"))))
          << mismatch.name;
    }
  }
}

TEST_P(CommunicatorContract, ADestroyedCommunicatorOrAnExceptionFailsThePeers) {
  if (!OneThreadCanBe(3)) GTEST_SKIP() << kOneThread;
  for (const bool throws : {false, true}) {
    Group group = Create(3);
    std::vector<StartedWork> works;
    for (int rank : {0, 1}) works.push_back(StartSum(*group[rank], "blocks.1"));
    try {
      const std::unique_ptr<Communicator> owned = std::move(group[2]);
      if (throws) throw std::runtime_error("the file is empty");
    } catch (const std::runtime_error&) {
    }
    for (int rank : {0, 1}) {
      EXPECT_THAT(
          Finish(std::move(works[rank])),
          StatusIs(
              throws ? Code::kAborted : Code::kUnavailable,
              AllOf(HasSubstr(absl::StrCat("blocks.1 on rank ", rank)),
                    HasSubstr(throws ? "rank 2 aborted: it has ended by an "
                                       "exception"
                                     : "rank 2"))));
    }
  }
}

TEST_P(CommunicatorContract, WhatIsDoneStaysDoneWhenAPeerLeaves) {
  if (!OneThreadCanBe(2)) GTEST_SKIP() << kOneThread;
  Group group = Create(2);
  auto a = StartSum(*group[0]);
  auto b = StartSum(*group[1]);
  ASSERT_OK(a);
  EXPECT_OK((*a)->Wait(absl::Now() + absl::Seconds(30)));
  group[0].reset();
  EXPECT_OK(Finish(std::move(b)));
  EXPECT_OK((*a)->Wait(absl::InfinitePast()));
}

// These tests are about errors of a part, which say what ranks of the world
// they are about.

constexpr absl::string_view kFirst = "rank 0 (world rank 3)";
constexpr absl::string_view kSecond = "rank 1 (world rank 1)";

// The groups that a rank has made; the last one is the one under test.
using Made = std::vector<std::unique_ptr<Communicator>>;

absl::Status SplitOnce(Communicator& comm, Made& made) {
  FSDP_ASSIGN_OR_RETURN(made.emplace_back(),
                        comm.Split(comm.rank() % 2, -comm.rank()));
  return absl::OkStatus();
}

// Makes a part of ranks 3, 2, 1, and in it one of the first and the last.
absl::Status SplitTwice(Communicator& comm, Made& made) {
  FSDP_ASSIGN_OR_RETURN(made.emplace_back(),
                        comm.Split(comm.rank() > 0 ? 1 : 0, -comm.rank()));
  Communicator& part = *made.back();
  FSDP_ASSIGN_OR_RETURN(auto nested, part.Split(part.rank() % 2, part.rank()));
  made.push_back(std::move(nested));
  return absl::OkStatus();
}

// A world of four ranks, and the part of its ranks 3 and 1, in this order.
struct WorldAndPair {
  Group world;
  std::vector<Made> made;  // by rank; the pair's are taken out
  std::unique_ptr<Communicator> first;
  std::unique_ptr<Communicator> second;
};

template <typename Split>
WorldAndPair MakePair(Group world, Split split) {
  WorldAndPair pair;
  pair.world = std::move(world);
  pair.made.resize(4);
  EXPECT_OK(AllOk(RunAll(pair.world, [&](Communicator& comm) {
    return split(comm, pair.made[comm.rank()]);
  })));
  pair.first = std::move(pair.made[3].back());
  pair.second = std::move(pair.made[1].back());
  return pair;
}

// Makes the same pair of two worlds, in two ways.
std::vector<WorldAndPair> MakePairs(Group world, Group another) {
  std::vector<WorldAndPair> pairs;
  pairs.push_back(MakePair(std::move(world), SplitOnce));
  pairs.push_back(MakePair(std::move(another), SplitTwice));
  return pairs;
}

TEST_P(CommunicatorContract, PartsSayWhichRanksOfTheWorldTheyHave) {
  if (!CanHave(4)) GTEST_SKIP();
  for (const WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    for (const auto* part : {&pair.first, &pair.second}) {
      const RankNames& names = (*part)->names();
      EXPECT_EQ(names.size(), 2);
      EXPECT_EQ(names.world_rank(0), 3);
      EXPECT_EQ(names.world_rank(1), 1);
    }
    EXPECT_THAT(pair.first->ToString(), EndsWith("rank 0 of 2 (world rank 3)"));
    EXPECT_THAT(pair.second->ToString(),
                EndsWith("rank 1 of 2 (world rank 1)"));
    EXPECT_EQ(pair.world[3]->Place(), "rank 3 of 4");
  }
}

TEST_P(CommunicatorContract, PartsOfAllRanksAreCalledAsTheWorld) {
  if (!CanHave(3)) GTEST_SKIP();
  const Group world = Create(3);
  // A rank that leaves its part at once may do so before others have made it.
  Group parts(3);
  const auto run = [&](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(parts[comm.rank()], comm.Split(0, 0));
    return absl::OkStatus();
  };
  ASSERT_OK(AllOk(RunAll(world, run)));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(parts[rank]->Place(), world[rank]->Place());
  }
}

TEST_P(CommunicatorContract, PartsNameTheLateRankOfTheWorld) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  for (const WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    auto work = StartSum(*pair.second);
    ASSERT_OK(work);
    EXPECT_THAT((*work)->Wait(absl::Now() + absl::Milliseconds(50)),
                StatusIs(Code::kDeadlineExceeded,
                         AllOf(HasSubstr("grads on rank 1 of 2 (world rank 1)"),
                               HasSubstr(std::string(kFirst)))));
    // The late rank is told who has given up.
    EXPECT_THAT(Finish(StartSum(*pair.first)),
                StatusIs(Code::kAborted,
                         AllOf(HasSubstr("on rank 0 of 2 (world rank 3)"),
                               HasSubstr(std::string(kSecond)))));
  }
}

TEST_P(CommunicatorContract, PartsNameTheRankOfTheWorldThatIsLostOrAborts) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  for (const bool aborts : {false, true}) {
    for (WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
      auto work = StartSum(*pair.second);
      if (aborts) pair.first->Abort(absl::InternalError("disk full"));
      pair.first.reset();
      EXPECT_THAT(
          Finish(std::move(work)),
          StatusIs(aborts ? Code::kAborted : Code::kUnavailable,
                   AllOf(HasSubstr("on rank 1 of 2 (world rank 1)"),
                         HasSubstr(absl::StrCat(
                             kFirst, aborts ? " aborted: disk full" : "")))));
    }
  }
}

TEST_P(CommunicatorContract, PartsNameTheRanksOfTheWorldWhoseCallsDiffer) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  if (!GetParam().compares_calls) return;
  for (const WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    auto first = StartSum(*pair.first);
    auto second = StartSum(*pair.second, "grads", 6);
    for (auto* work : {&first, &second}) {
      EXPECT_THAT(Finish(std::move(*work)),
                  StatusIs(Code::kInvalidArgument,
                           AllOf(HasSubstr(absl::StrCat(kFirst, " called")),
                                 HasSubstr(absl::StrCat(kSecond, " called")))));
    }
  }
}

TEST_P(CommunicatorContract, PartsNameTheRankOfTheWorldThatIsRefused) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  for (const WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    const auto refused = StatusIs(Code::kInvalidArgument,
                                  HasSubstr("on rank 0 of 2 (world rank 3)"));
    EXPECT_THAT(pair.first->AllReduce(at::Tensor(), ReduceOp::kSum, "grads"),
                refused);
    EXPECT_THAT(pair.first->Split(-1, 0), refused);
  }
}

}  // namespace
}  // namespace fsdp::comm::testing
