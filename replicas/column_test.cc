#include "replicas/column.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/run_ranks.h"
#include "replicas/testing/test_keeper.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::Contains;
using ::testing::Not;

constexpr absl::Duration kLimit = absl::Minutes(1);

absl::Time Deadline() { return absl::Now() + kLimit; }

class ColumnTest : public ::testing::TestWithParam<comm::Backend> {
 protected:
  void SetUp() override {
    comm::Environment place = keeper_.place();
    place.kept_store_prefix = "column";
    comm::ConnectOptions options;
    options.backend = GetParam();
    options.timeout = options.connect_timeout = kLimit;
    for (auto& column : columns_) {
      column = std::make_unique<Column>(place, options);
    }
  }

  testing::TestKeeper keeper_;
  std::array<std::unique_ptr<Column>, 2> columns_;
};

absl::Status AddUp(Communicator& ranks) {
  FSDP_ASSIGN_OR_RETURN(
      const auto work,
      ranks.AllReduce(at::ones({3}), comm::ReduceOp::kSum, "ones"));
  return work->Wait(Deadline());
}

// The other rank has connected and is silent, as if it were stopped.
TEST_P(ColumnTest, WhoWaitsInAGroupReturnsWhereItsEpochEnds) {
  for (const bool in_part : {false, true}) {
    const absl::Time began = absl::Now();
    const int64_t epoch = in_part ? 4 : 2;
    absl::Notification connected;
    absl::Notification over;
    std::thread silent([&] {
      EXPECT_OK(columns_[1]->Connect(epoch, 1, 2));
      const auto part = columns_[1]->ConnectPart(1, 2);
      EXPECT_OK(part.status());
      over.WaitForNotificationWithTimeout(kLimit);
    });
    std::thread waits([&] {
      EXPECT_OK(columns_[0]->Connect(epoch, 0, 2));
      const auto part = columns_[0]->ConnectPart(0, 2);
      EXPECT_OK(part.status());
      connected.Notify();
      EXPECT_THAT(AddUp(in_part ? **part : columns_[0]->ranks()),
                  StatusIs(absl::StatusCode::kAborted, _));
    });
    connected.WaitForNotificationWithTimeout(kLimit);
    columns_[0]->EndBefore(epoch, absl::AbortedError("it goes on"));
    columns_[0]->EndBefore(epoch + 1, absl::AbortedError("it is over"));
    waits.join();
    over.Notify();
    silent.join();
    EXPECT_LT(absl::Now() - began, kLimit / 2);
  }
}

TEST_P(ColumnTest, WhoWaitsForAGroupReturnsWhereItsEpochEnds) {
  const absl::Time began = absl::Now();
  std::thread waits([&] {
    EXPECT_THAT(columns_[0]->Connect(1, 0, 2),
                StatusIs(absl::StatusCode::kCancelled, _));
  });
  columns_[0]->EndBefore(2, absl::AbortedError("it is over"));
  waits.join();
  EXPECT_LT(absl::Now() - began, kLimit / 2);
}

// Others may have gone on already.
TEST_P(ColumnTest, AnEpochThatIsCurrentGoesOn) {
  std::array<std::thread, 2> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    columns_[rank]->EndBefore(3, absl::AbortedError("it is over"));
    ranks[rank] = std::thread([this, rank] {
      EXPECT_OK(columns_[rank]->Connect(3, rank, 2));
      columns_[rank]->EndBefore(3, absl::AbortedError("it is over"));
      EXPECT_OK(AddUp(columns_[rank]->ranks()));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

INSTANTIATE_TEST_SUITE_P(Backends, ColumnTest,
                         ::testing::Values(comm::Backend::kAuto,
                                           comm::Backend::kGloo));

struct LeafShape {
  int64_t numel;
  at::ScalarType dtype = at::kFloat;  // of the gradient
  // The rank that has no gradient; -1: none.
  int without = -1;
  bool anywhere = true;
};

// Values are small whole numbers, so that sums are exact in all dtypes.
std::optional<at::Tensor> GradientOf(const LeafShape& shape, int leaf,
                                     int rank) {
  if (!shape.anywhere || shape.without == rank) return std::nullopt;
  const at::Tensor count =
      at::arange(shape.numel, at::kLong).mul(rank + 2).add(leaf);
  return at::remainder(count, 7).to(shape.dtype);
}

std::vector<at::Tensor> MakeLeaves(const std::vector<LeafShape>& shapes,
                                   int rank) {
  std::vector<at::Tensor> leaves;
  for (size_t i = 0; i < shapes.size(); ++i) {
    leaves.push_back(
        at::zeros({shapes[i].numel}, shapes[i].dtype).requires_grad_(true));
    const auto gradient = GradientOf(shapes[i], static_cast<int>(i), rank);
    if (gradient.has_value()) leaves.back().mutable_grad() = *gradient;
  }
  return leaves;
}

// Compares with the mean by its definition: the sum over ranks, divided once.
void ExpectMeans(const std::vector<LeafShape>& shapes, int ranks,
                 const std::vector<at::Tensor>& leaves) {
  for (size_t i = 0; i < shapes.size(); ++i) {
    at::Tensor sum = at::zeros({shapes[i].numel}, at::kDouble);
    bool anywhere = false;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto gradient = GradientOf(shapes[i], static_cast<int>(i), rank);
      if (!gradient.has_value()) continue;
      anywhere = true;
      sum += gradient->to(at::kDouble);
    }
    const at::Tensor& actual = leaves[i].grad();
    if (anywhere && shapes[i].numel == 0) continue;
    ASSERT_EQ(actual.defined(), anywhere) << "leaf " << i;
    if (!anywhere) continue;
    EXPECT_TRUE(at::equal(
        actual, sum.to(shapes[i].dtype).div(static_cast<double>(ranks))))
        << "leaf " << i;
  }
}

// In each step the own gradients stay until the means take their place, and
// sums may be made again.
absl::Status CheckOnRank(Communicator& column,
                         const std::vector<std::vector<LeafShape>>& steps) {
  const std::vector<at::Tensor> leaves = MakeLeaves(steps[0], column.rank());
  GradientMeans means(column, leaves);
  for (const std::vector<LeafShape>& shapes : steps) {
    const auto mine = [&](size_t leaf) {
      return GradientOf(shapes[leaf], static_cast<int>(leaf), column.rank());
    };
    for (size_t i = 0; i < leaves.size(); ++i) {
      leaves[i].mutable_grad() = mine(i).value_or(at::Tensor());
    }
    for (int time = 0; time < 2; ++time) {
      FSDP_RETURN_IF_ERROR(means.Sum(Deadline()));
      for (size_t i = 0; i < leaves.size(); ++i) {
        EXPECT_EQ(leaves[i].grad().defined(), mine(i).has_value());
        EXPECT_TRUE(!mine(i) || at::equal(leaves[i].grad(), *mine(i))) << i;
      }
    }
    FSDP_RETURN_IF_ERROR(means.Apply());
    ExpectMeans(shapes, column.world_size(), leaves);
  }
  return absl::OkStatus();
}

const std::vector<LeafShape> kMixed = {
    {7},
    {0},
    {1, at::kHalf},
    {13, at::kBFloat16},
    {5, at::kDouble},
    {11, at::kFloat, /*without=*/0},
    {3, at::kFloat, -1, /*anywhere=*/false},
    {0, at::kFloat, 0},
    {17, at::kBFloat16, /*without=*/1},
    {1009},
};

TEST(GradientMeansTest, AreTheSumsDividedByTheNumberOfRanks) {
  std::vector<LeafShape> fewer = kMixed;
  for (const size_t leaf : {0, 3, 9}) fewer[leaf].anywhere = false;
  for (const int ranks : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& column) {
      return CheckOnRank(column, {fewer, kMixed});
    }));
  }
}

TEST(GradientMeansTest, MayBeLongOrOfNothing) {
  const std::vector<LeafShape> many_collectives = {
      {(int64_t{5} << 20) + 3}, {100}, {(int64_t{4} << 20) + 1}, {9}};
  for (const auto& shapes : {many_collectives, {}}) {
    EXPECT_OK(RunAllRanks(2, [&](Communicator& column) {
      return CheckOnRank(column, {shapes});
    }));
  }
}

TEST(GradientMeansTest, OfOtherDtypesAreRefusedByAll) {
  const auto statuses = RunRanks(2, [](Communicator& column) -> absl::Status {
    const at::ScalarType dtype = column.rank() == 0 ? at::kHalf : at::kFloat;
    GradientMeans means(column, MakeLeaves({{7}, {3, dtype}}, column.rank()));
    const absl::Status status = means.Sum(Deadline());
    return status.ok() ? absl::InternalError("they were added") : status;
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, Not(StatusIs(absl::StatusCode::kInternal, _)));
  }
  EXPECT_THAT(statuses, Contains(StatusIs(absl::StatusCode::kInvalidArgument,
                                          ::testing::HasSubstr("Half"))));
}

TEST(GradientMeansTest, ARankThatCannotEndsTheOthers) {
  const auto statuses = RunRanks(3, [](Communicator& column) -> absl::Status {
    std::vector<at::Tensor> leaves = MakeLeaves({{7}, {3}}, column.rank());
    GradientMeans means(column, leaves);
    if (column.rank() == 1) {
      column.Abort(absl::UnavailableError("its replica is lost"));
    }
    absl::Status status = means.Sum(Deadline());
    for (size_t i = 0; i < leaves.size(); ++i) {
      EXPECT_TRUE(at::equal(leaves[i].grad(),
                            *GradientOf({leaves[i].numel()},
                                        static_cast<int>(i), column.rank())));
    }
    return status;
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, _));
  }
}

}  // namespace
}  // namespace fsdp::replicas
