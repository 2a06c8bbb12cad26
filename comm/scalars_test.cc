#include <cmath>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::RunAllRanks;

absl::Status Expect(double actual, double expected) {
  if (actual == expected) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(actual, " for ", expected));
}

TEST(ScalarsTest, AreThoseOfAllRanks) {
  for (const int world_size : {1, 3}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& comm) -> absl::Status {
      // Ranks 0, 1, 2 have -2.5, -0.5, -1.5.
      const double value = -2.5 + (2 * comm.rank()) % 3;
      const bool alone = comm.world_size() == 1;
      FSDP_ASSIGN_OR_RETURN(const double sum, Sum(comm, value));
      FSDP_RETURN_IF_ERROR(Expect(sum, alone ? -2.5 : -4.5));
      FSDP_ASSIGN_OR_RETURN(const double mean, Mean(comm, value));
      FSDP_RETURN_IF_ERROR(Expect(mean, alone ? -2.5 : -1.5));
      FSDP_ASSIGN_OR_RETURN(const double max, Max(comm, value));
      return Expect(max, alone ? -2.5 : -0.5);
    }));
  }
}

TEST(ScalarsTest, AreExactInDouble) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& comm) -> absl::Status {
    constexpr double kLarge = 9007199254740991;  // 2^53 - 1
    FSDP_ASSIGN_OR_RETURN(const double sum,
                          Sum(comm, comm.rank() == 0 ? kLarge : 1));
    return Expect(sum, kLarge + 1);
  }));
}

TEST(ScalarsTest, WhatIsNoNumberIsSeenByAll) {
  for (const int which : {0, 1, 2}) {
    EXPECT_OK(RunAllRanks(3, [which](Communicator& comm) -> absl::Status {
      const double value =
          comm.rank() == which ? std::numeric_limits<double>::quiet_NaN() : 7;
      FSDP_ASSIGN_OR_RETURN(const double sum, Sum(comm, value));
      FSDP_ASSIGN_OR_RETURN(const double mean, Mean(comm, value));
      FSDP_ASSIGN_OR_RETURN(const double max, Max(comm, value));
      return std::isnan(sum) && std::isnan(mean) && std::isnan(max)
                 ? absl::OkStatus()
                 : absl::InternalError(absl::StrCat("a number: ", sum, ", ",
                                                    mean, ", or ", max));
    }));
  }
}

TEST(ScalarsTest, CallsThatDifferAreNamed) {
  for (const absl::Status& status :
       testing::RunRanks(2, [](Communicator& comm) {
         return comm.rank() == 0 ? Mean(comm, 1).status()
                                 : Max(comm, 1).status();
       })) {
    EXPECT_TRUE(absl::StrContains(status.message(), "the mean of a number"))
        << status;
  }
}

}  // namespace
}  // namespace fsdp::comm
