#include "testing/simulation/attempt_faults.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::simulation {
namespace {

using ::testing::ElementsAre;

Fault Of(FaultKind kind, int rank = 1) {
  Fault fault;
  fault.kind = kind;
  fault.rank = rank;
  return fault;
}

// An error to which a fault of rank 1 leads.
struct Told {
  FaultKind kind;
  absl::Status error;
};

std::vector<Told> All() {
  return {
      {FaultKind::kKill,
       absl::UnavailableError("all-gather #3 of root on rank 0 of 2: rank 1 "
                              "(last seen in split #1 of the group) is gone")},
      {FaultKind::kClockJump,
       absl::DeadlineExceededError("all-gather #3 of root on rank 1 of 2: not "
                                   "done at the deadline; all ranks have "
                                   "called")},
      {FaultKind::kThrow,
       absl::UnknownError("training: the user's code has failed")},
      {FaultKind::kDiskFull,
       absl::ResourceExhaustedError(
           "rank 1: make folder /run: No space left on device")},
      {FaultKind::kDiskError,
       absl::UnavailableError("rank 1: sync folder /run: Input/output error")},
      {FaultKind::kRot,
       absl::DataLossError("rank 1: /run/step-2/training.json, bytes [0, 9): "
                           "their CRC32C is 1 instead of 2")},
      {FaultKind::kSsdError,
       absl::UnavailableError(
           "rank 1: write region 'root #0' of scratch file in /ssd: "
           "Input/output error")},
      {FaultKind::kSsdTorn,
       absl::DataLossError("rank 1: read region 'root #0' of scratch file in "
                           "/ssd: CRC32C 1 instead of 2")},
      {FaultKind::kSsdShort,
       absl::UnavailableError(
           "rank 1: write region 'root #0' of scratch file in /ssd: only 512 "
           "of 4096 bytes were written")},
      {FaultKind::kNotFinite,
       absl::FailedPreconditionError("step 3: the loss of rank 1 is nan")},
      {FaultKind::kSignal,
       absl::CancelledError("stopped by signal 15 (SIGTERM) after step 2")},
  };
}

TEST(NamedErrorsTest, EachFaultHasItsOwnCause) {
  for (const Told& fault : All()) {
    for (const Told& error : All()) {
      // If a rank has thrown, it is enough to say that it is gone.
      const bool is_told =
          fault.kind == error.kind ||
          (fault.kind == FaultKind::kThrow && error.kind == FaultKind::kKill);
      EXPECT_EQ(IsNamedBy(Of(fault.kind), error.error), is_told)
          << ToString(fault.kind) << ": " << error.error;
    }
  }
}

TEST(NamedErrorsTest, WhoIsLostIsNamed) {
  for (const char* text :
       {"rank 0: rank 1 is gone", "rank 1 (no call so far) is gone",
        "rank 3 (world rank 1) (last seen in fence 2) is gone",
        "rank 1 (last seen in all-gather #8 of GatherStateDict()) is gone",
        "rank 1 aborted: bad", "rank 1 gave up waiting for fence 3: late",
        "still missing: rank 0 (no call so far), rank 1 (no call so far)"}) {
    for (const FaultKind kind :
         {FaultKind::kKill, FaultKind::kSilence, FaultKind::kFinish,
          FaultKind::kLongStop, FaultKind::kThrow}) {
      EXPECT_TRUE(IsNamedBy(Of(kind), absl::UnavailableError(text))) << text;
      EXPECT_FALSE(IsNamedBy(Of(kind, 2), absl::UnavailableError(text)))
          << text;
    }
  }
  for (const char* text :
       {"fence 2 on rank 1 of 3: rank 0 is gone", "rank 12 is gone", "is gone",
        "rank 1 (world rank 5) is gone", "rank 1: a bad option",
        "rank 1 calls an all-gather, rank 0 a broadcast"}) {
    EXPECT_FALSE(IsNamedBy(Of(FaultKind::kKill), absl::UnavailableError(text)))
        << text;
  }
}

TEST(NamedErrorsTest, ALongStopIsSeenWhereItIs) {
  const Fault stop = Of(FaultKind::kLongStop);
  for (const char* text :
       {"fence 1 on rank 1 of 2: not done at the deadline; all have called",
        "saving step 2: rank 1 has waited for its disk for 1h",
        "save step 2: waiting for the disk: not done at the deadline"}) {
    EXPECT_TRUE(IsNamedBy(stop, absl::DeadlineExceededError(text))) << text;
  }
  EXPECT_FALSE(IsNamedBy(
      stop, absl::DeadlineExceededError("rank 2 has waited for its disk")));
}

TEST(NamedErrorsTest, NobodyHasToNoticeAPause) {
  for (const FaultKind kind : {FaultKind::kStop, FaultKind::kSlow}) {
    for (const Told& error : All()) {
      EXPECT_FALSE(IsNamedBy(Of(kind), error.error)) << error.error;
    }
  }
}

TEST(NamedErrorsTest, AnErrorLeadsToTheFaultFromRankToRank) {
  const std::vector<Fault> faults = {Of(FaultKind::kKill, 3)};
  EXPECT_THAT(
      RanksThatSayNothing(
          faults, {absl::AbortedError("rank 1 aborted: itself"),
                   absl::AbortedError("rank 2 (fence 1) gave up "
                                      "waiting for fence 1; rank 2 "
                                      "(last seen in fence 1) is gone"),
                   absl::UnavailableError("rank 3 is gone"), absl::OkStatus()}),
      ::testing::IsEmpty());
  EXPECT_THAT(
      RanksThatSayNothing(faults, {absl::AbortedError("rank 1 aborted: itself"),
                                   absl::AbortedError("rank 0 is gone"),
                                   absl::UnavailableError("rank 3 is gone"),
                                   absl::InvalidArgumentError("rank 3: no")}),
      ElementsAre(0, 1, 3));
  EXPECT_THAT(RanksThatSayNothing(
                  {}, {absl::AbortedError("rank 1 is gone"), absl::OkStatus()}),
              ElementsAre(0));
}

}  // namespace
}  // namespace fsdp::simulation
