#include "comm/mesh.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::Check;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Refers to a communicator that outlives the result.
std::shared_ptr<Communicator> Unowned(Communicator& communicator) {
  return {std::shared_ptr<void>(), &communicator};
}

// Returns the world ranks of `group` by their rank in it. It also sums them up,
// so that both kinds of collective are tried.
absl::StatusOr<std::vector<int64_t>> Members(Communicator& group,
                                             int world_rank) {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  const at::Tensor mine = at::full({1}, world_rank, at::kLong);
  const at::Tensor all = at::empty({group.world_size()}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(auto work, group.AllGather(all, mine, "members"));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  FSDP_ASSIGN_OR_RETURN(work, group.AllReduce(mine, ReduceOp::kSum, "sum"));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  FSDP_RETURN_IF_ERROR(CheckThat(mine.item<int64_t>(),
                                 all.sum().item<int64_t>(),
                                 "the sum of the members"));
  const int64_t* data = all.const_data_ptr<int64_t>();
  return std::vector<int64_t>(data, data + all.numel());
}

absl::Status CheckMembers(Communicator& group, int world_rank,
                          const std::vector<int64_t>& expected) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> members,
                        Members(group, world_rank));
  return CheckThat(members, expected, "the members");
}

TEST(MeshTest, OneDimensionIsTheWorldItself) {
  for (const int world_size : {1, 2, 4, 6}) {
    for (const int size : {world_size, -1}) {
      EXPECT_OK(RunAllRanks(world_size, [&](Communicator& c) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const Mesh mesh,
                              Mesh::Create(Unowned(c), {{"shard", size}}));
        FSDP_RETURN_IF_ERROR(Check(
            mesh.num_dimensions() == 1 && mesh.world().get() == &c &&
                mesh.group(0).get() == &c && mesh.coordinate(0) == c.rank() &&
                mesh.dimension(0).name == "shard" &&
                mesh.dimension(0).size == world_size,
            "another mesh"));
        return Members(*mesh.group(0), c.rank()).status();
      }));
    }
  }
}

struct Shape {
  int rows;
  int columns;
};
constexpr Shape kShapes[] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {1, 4}, {4, 1},
                             {2, 3}, {3, 2}, {6, 1}, {2, 4}, {4, 2}};

TEST(MeshTest, TheLastDimensionVariesFastest) {
  for (const Shape shape : kShapes) {
    const int world_size = shape.rows * shape.columns;
    EXPECT_OK(RunAllRanks(
        world_size,
        [&](Communicator& c) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(
              const Mesh mesh,
              Mesh::Create(Unowned(c), {{"row", shape.rows}, {"column", -1}}));
          const int row = c.rank() / shape.columns;
          const int column = c.rank() % shape.columns;
          FSDP_RETURN_IF_ERROR(
              Check(mesh.num_dimensions() == 2 && mesh.coordinate(0) == row &&
                        mesh.coordinate(1) == column &&
                        mesh.dimension(0).name == "row" &&
                        mesh.dimension(1).size == shape.columns,
                    "another place"));
          std::vector<int64_t> same_column(shape.rows);
          for (int i = 0; i < shape.rows; ++i) {
            same_column[i] = i * shape.columns + column;
          }
          std::vector<int64_t> same_row(shape.columns);
          for (int i = 0; i < shape.columns; ++i) {
            same_row[i] = row * shape.columns + i;
          }
          FSDP_RETURN_IF_ERROR(
              CheckMembers(*mesh.group(0), c.rank(), same_column));
          return CheckMembers(*mesh.group(1), c.rank(), same_row);
        }))
        << shape.rows << " x " << shape.columns;
  }
}

TEST(MeshTest, AbortReachesThePeersInEveryGroup) {
  // Rank 0 comes to none of these; the others wait in one group each.
  const std::vector<absl::Status> results =
      RunRanks(4, [](Communicator& c) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const Mesh mesh,
                              Mesh::Create(Unowned(c), {{"a", 2}, {"b", 2}}));
        Communicator* const groups[] = {nullptr, mesh.group(1).get(),
                                        mesh.group(0).get(), &c};
        if (c.rank() == 0) {
          mesh.Abort(absl::DataLossError("rank 0 is done for"));
          return absl::OkStatus();
        }
        return Members(*groups[c.rank()], c.rank()).status();
      });
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT_THAT(results[rank], StatusIs(Code::kAborted, HasSubstr("done for")))
        << rank;
  }
}

TEST(MeshTest, AllRanksRefuseWhatIsNoMesh) {
  struct Case {
    std::vector<MeshDimension> dimensions;
    const char* message;
  };
  const std::vector<Case> cases = {
      {{}, "there are 0 dimensions"},
      {{{"a", 2}, {"b", 3}, {"c", 1}}, "there are 3 dimensions"},
      {{{"", 6}}, "a name is empty"},
      {{{"a", 2}, {"", 3}}, "a name is empty"},
      {{{"a", 2}, {"a", 3}}, "the names are equal"},
      {{{"a", 5}}, "5 is not the number of ranks, 6"},
      {{{"a", 2}, {"b", 2}}, "4 is not the number of ranks, 6"},
      {{{"a", 4}, {"b", -1}}, "4 does not divide the number of ranks, 6"},
      {{{"a", -1}, {"b", 12}}, "12 does not divide the number of ranks, 6"},
      {{{"a", -1}, {"b", -1}}, "one of them may be -1"},
      {{{"a", 0}, {"b", 6}}, "sizes are positive"},
      {{{"a", -2}, {"b", -3}}, "sizes are positive"},
      {{{"a", 1 << 30}, {"b", 1 << 30}}, "is not the number of ranks, 6"},
  };
  for (const Case& test : cases) {
    EXPECT_THAT(
        RunRanks(6,
                 [&](Communicator& c) {
                   return Mesh::Create(Unowned(c), test.dimensions).status();
                 }),
        Each(StatusIs(Code::kInvalidArgument,
                      AllOf(HasSubstr("mesh of "), HasSubstr(test.message)))));
  }
}

TEST(MeshTest, AllRanksRefuseDimensionsThatDiffer) {
  EXPECT_THAT(
      RunRanks(
          4,
          [](Communicator& c) {
            const int rows = c.rank() == 2 ? 4 : 2;
            return Mesh::Create(Unowned(c), {{"a", rows}, {"b", -1}}).status();
          }),
      Each(StatusIs(Code::kInvalidArgument,
                    AllOf(HasSubstr("mesh dimensions differ between ranks"),
                          HasSubstr("\"a 2 x b -1\" on rank 0"),
                          HasSubstr("\"a 4 x b -1\" on rank 2")))));
}

TEST(MeshTest, ToStringShowsWhichRanksShareAGroup) {
  const struct {
    int replicas;
    int shards;
    const char* groups;
  } cases[] = {{2, 3,
                "\n  replicate: {0 3} {1 4} {2 5}"
                "\n  shard: {0 1 2} {3 4 5}"},
               {5, 2,
                "\n  replicate: {0 2 ... 8} {1 3 ... 9}"
                "\n  shard: {0 1} {2 3} {4 5} {6 7} ... (5 groups)"}};
  for (const auto& test : cases) {
    const int ranks = test.replicas * test.shards;
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& c) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          const Mesh mesh,
          Mesh::Create(Unowned(c),
                       {{"replicate", test.replicas}, {"shard", test.shards}}));
      return CheckThat(
          mesh.ToString(),
          absl::StrCat("replicate ", test.replicas, " x shard ", test.shards,
                       " ranks, this is rank ", c.rank(), test.groups),
          "the text");
    }));
  }
}

TEST(SplitConsecutiveTest, NeighboursShareAGroup) {
  for (const Shape shape : kShapes) {
    const int size = shape.columns;
    EXPECT_OK(
        RunAllRanks(shape.rows * size, [&](Communicator& c) -> absl::Status {
          const std::shared_ptr<Communicator> world = Unowned(c);
          FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Communicator> part,
                                SplitConsecutive(world, size));
          FSDP_RETURN_IF_ERROR(
              Check((part == world) == (size == c.world_size()),
                    "all ranks are the group itself, and only they"));
          std::vector<int64_t> expected;
          expected.reserve(size);
          for (int i = 0; i < size; ++i) {
            expected.push_back(c.rank() / size * size + i);
          }
          return CheckMembers(*part, c.rank(), expected);
        }));
  }
}

TEST(SplitConsecutiveTest, AllRanksRefuseASizeThatDoesNotFit) {
  for (const int size : {-1, 0, 4, 5, 12}) {
    EXPECT_THAT(
        RunRanks(6,
                 [size](Communicator& c) {
                   return SplitConsecutive(Unowned(c), size).status();
                 }),
        Each(StatusIs(Code::kInvalidArgument,
                      HasSubstr("does not divide the number of ranks, 6"))));
  }
  EXPECT_THAT(
      RunRanks(
          6,
          [](Communicator& c) {
            return SplitConsecutive(Unowned(c), c.rank() == 1 ? 3 : 2).status();
          }),
      Each(StatusIs(Code::kInvalidArgument,
                    HasSubstr("group sizes differ between ranks"))));
}

}  // namespace
}  // namespace fsdp::comm::testing
