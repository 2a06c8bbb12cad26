// Tests that errors of a part say which ranks of the world they are about.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/finish.h"
#include "comm/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

constexpr absl::string_view kFirst = "rank 0 (world rank 3)";
constexpr absl::string_view kSecond = "rank 1 (world rank 1)";

StartedWork StartSum(Communicator& comm, int64_t size = 4) {
  return comm.AllReduce(at::zeros({size}, ContractTensor(at::kFloat)),
                        ReduceOp::kSum, "grads");
}

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
    const absl::Status missed =
        (*work)->Wait(absl::Now() + absl::Milliseconds(50));
    EXPECT_THAT(missed,
                StatusIs(absl::StatusCode::kDeadlineExceeded,
                         HasSubstr("grads on rank 1 of 2 (world rank 1)")));
    if (GetParam().names_missing_ranks) {
      EXPECT_THAT(std::string(missed.message()),
                  HasSubstr(std::string(kFirst)));
    }
    // The late rank is told who has given up.
    EXPECT_THAT(Finish(StartSum(*pair.first)),
                StatusIs(absl::StatusCode::kAborted,
                         AllOf(HasSubstr("on rank 0 of 2 (world rank 3)"),
                               HasSubstr(std::string(kSecond)))));
  }
}

TEST_P(CommunicatorContract, PartsNameTheLostRankOfTheWorld) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  for (WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    auto work = StartSum(*pair.second);
    pair.first.reset();
    EXPECT_THAT(Finish(std::move(work)),
                StatusIs(absl::StatusCode::kUnavailable,
                         AllOf(HasSubstr("on rank 1 of 2 (world rank 1)"),
                               HasSubstr(std::string(kFirst)))));
  }
}

TEST_P(CommunicatorContract, PartsNameTheRankOfTheWorldThatAborts) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  for (const WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    auto work = StartSum(*pair.second);
    pair.first->Abort(absl::InternalError("disk full"));
    EXPECT_THAT(
        Finish(std::move(work)),
        StatusIs(absl::StatusCode::kAborted,
                 HasSubstr(absl::StrCat(kFirst, " aborted: disk full"))));
  }
}

TEST_P(CommunicatorContract, PartsNameTheRanksOfTheWorldWhoseCallsDiffer) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  if (!GetParam().compares_calls) return;
  for (const WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    auto first = StartSum(*pair.first, 4);
    auto second = StartSum(*pair.second, 6);
    for (auto* work : {&first, &second}) {
      EXPECT_THAT(Finish(std::move(*work)),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AllOf(HasSubstr(absl::StrCat(kFirst, " called")),
                                 HasSubstr(absl::StrCat(kSecond, " called")))));
    }
  }
}

TEST_P(CommunicatorContract, PartsNameTheRankOfTheWorldThatIsRefused) {
  if (!OneThreadCanBe(4)) GTEST_SKIP();
  for (const WorldAndPair& pair : MakePairs(Create(4), Create(4))) {
    EXPECT_THAT(pair.first->AllReduce(at::Tensor(), ReduceOp::kSum, "grads"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("on rank 0 of 2 (world rank 3)")));
    EXPECT_THAT(pair.first->Split(-1, 0),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("on rank 0 of 2 (world rank 3)")));
  }
}

}  // namespace
}  // namespace fsdp::comm::testing
