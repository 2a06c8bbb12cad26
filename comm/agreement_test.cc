#include "comm/agreement.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::CheckThat;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

TEST(AgreeTest, AllReturnTheErrorOfTheLowestRank) {
  for (const int world_size : {3, 5}) {
    EXPECT_THAT(
        RunRanks(world_size,
                 [](Communicator& communicator) -> absl::Status {
                   const int rank = communicator.rank();
                   const absl::Status mine =
                       rank == 0 ? absl::OkStatus()
                                 : absl::NotFoundError(
                                       absl::StrCat("no file ", rank));
                   absl::Status agreed =
                       Agree(communicator, mine, "loading", Soon());
                   // The group goes on after an error.
                   FSDP_RETURN_IF_ERROR(
                       Agree(communicator, absl::OkStatus(), "second", Soon()));
                   return agreed;
                 }),
        Each(StatusIs(Code::kNotFound, "rank 1: no file 1")));
  }
}

TEST(AgreeTest, MessagesMayBeEmptyOrLong) {
  EXPECT_THAT(RunRanks(2,
                       [](Communicator& communicator) {
                         return Agree(communicator, absl::CancelledError(),
                                      "loading", Soon());
                       }),
              Each(StatusIs(Code::kCancelled, "rank 0: ")));
  const std::string text(1 << 20, 'x');
  for (const absl::Status& status :
       RunRanks(2, [&text](Communicator& communicator) {
         return Agree(communicator, absl::UnknownError(text), "loading",
                      Soon());
       })) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("xxx..."));
    EXPECT_LT(status.message().size(), 5000);
  }
}

TEST(AgreeTest, AnErrorThatCannotBeToldIsKept) {
  const std::vector<absl::Status> results =
      RunRanks(2, [](Communicator& communicator) -> absl::Status {
        if (communicator.rank() == 1) {
          return Agree(communicator, absl::DataLossError("mine"), "loading",
                       absl::Now() + absl::Milliseconds(100));
        }
        // This rank does not come, but waits for the group to be aborted.
        return Barrier(communicator, "other", Soon());
      });
  EXPECT_THAT(results[1], StatusIs(Code::kDataLoss, "mine"));
  EXPECT_THAT(results[0], ::testing::Not(::fsdp::testing::IsOk()));
}

// Returns what ranks with these texts are told.
std::vector<absl::Status> Checked(const std::vector<std::string>& texts) {
  return RunRanks(static_cast<int>(texts.size()), [&](Communicator& comm) {
    return CheckSame(comm, texts[comm.rank()], "options", Soon());
  });
}

TEST(CheckSameTest, NamesTheRanksAndTheFirstDifference) {
  EXPECT_THAT(
      Checked({"a\nb\nc", "a\nb\nc", "a\nB\nC", "a\nb"}),
      Each(StatusIs(Code::kInvalidArgument,
                    "options differ between ranks: ranks 2, 3 from rank 0; "
                    "line 2 is \"b\" on rank 0 and \"B\" on rank 2")));
  EXPECT_THAT(
      Checked({"a\nb", "a"}),
      Each(StatusIs(Code::kInvalidArgument,
                    AllOf(HasSubstr("rank 1 from rank 0"),
                          HasSubstr("line 2 is \"b\" on rank 0 and nothing on "
                                    "rank 1")))));
}

TEST(CheckSameTest, LongLinesAreCut) {
  for (const absl::Status& status :
       Checked({std::string(1 << 20, 'a'), std::string(1 << 20, 'b')})) {
    EXPECT_THAT(status,
                StatusIs(Code::kInvalidArgument,
                         AllOf(HasSubstr("aaa..."), HasSubstr("bbb..."))));
    EXPECT_LT(status.message().size(), 1000);
  }
}

TEST(BroadcastStringTest, AllReceiveTheTextOfTheRoot) {
  for (const int root : {0, 2}) {
    for (const std::string& text :
         {std::string(), std::string("a\0b", 3), std::string(100003, 'x')}) {
      EXPECT_OK(RunAllRanks(3, [&](Communicator& communicator) -> absl::Status {
        const std::string mine = communicator.rank() == root ? text : "other";
        FSDP_ASSIGN_OR_RETURN(
            const std::string received,
            BroadcastString(communicator, mine, root, "text", Soon()));
        if (received == text) return absl::OkStatus();
        return absl::InternalError(
            absl::StrCat(received.size(), " bytes came instead of ",
                         text.size(), ": ", received.substr(0, 100)));
      }));
    }
  }
}

TEST(BarrierTest, ARankThatDoesNotComeIsNamed) {
  EXPECT_THAT(RunRanks(2,
                       [](Communicator& communicator) {
                         if (communicator.rank() == 1) return absl::OkStatus();
                         return Barrier(communicator, "start",
                                        absl::Now() + absl::Milliseconds(100));
                       })[0],
              StatusIs(Code::kDeadlineExceeded, HasSubstr("start")));
}

TEST(GatherStringsTest, EveryRankHasEveryText) {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    // The texts are empty, have zeros inside, and differ in length.
    const auto text_of = [](int rank) {
      return absl::StrCat(std::string(size_t{1} * rank * rank, 'a'),
                          std::string(rank, '\0'));
    };
    EXPECT_OK(RunAllRanks(world_size, [&](Communicator& communicator) {
      const absl::StatusOr<std::vector<std::string>> texts = GatherStrings(
          communicator, text_of(communicator.rank()), "texts", Soon());
      if (!texts.ok()) return texts.status();
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ((*texts)[rank], text_of(rank)) << rank;
      }
      EXPECT_EQ(texts->size(), world_size);
      return absl::OkStatus();
    }));
  }
}

TEST(ScalarsTest, AreThoseOfAllRanksAndExactInDouble) {
  for (const int world_size : {1, 3}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& comm) -> absl::Status {
      // Beside a number that float32 has not, ranks 0, 1, 2 have -2.5, -0.5,
      // -1.5.
      constexpr double kLarge = int64_t{1} << 40;
      const double value = kLarge - 2.5 + (2 * comm.rank()) % 3;
      const int ranks = comm.world_size();
      FSDP_ASSIGN_OR_RETURN(const double sum, Sum(comm, value));
      FSDP_RETURN_IF_ERROR(
          CheckThat(sum, ranks * kLarge - (ranks == 1 ? 2.5 : 4.5), "sum"));
      FSDP_ASSIGN_OR_RETURN(const double mean, Mean(comm, value));
      FSDP_RETURN_IF_ERROR(
          CheckThat(mean, kLarge - (ranks == 1 ? 2.5 : 1.5), "mean"));
      FSDP_ASSIGN_OR_RETURN(const double max, Max(comm, value));
      return CheckThat(max, kLarge - (ranks == 1 ? 2.5 : 0.5), "maximum");
    }));
  }
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

}  // namespace
}  // namespace fsdp::comm::testing
