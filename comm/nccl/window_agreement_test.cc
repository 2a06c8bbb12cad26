#include <ATen/ops/full.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/nccl/nccl_group.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm {
namespace {

constexpr int kRanks = 3;

absl::StatusOr<bool> TrueOnAll(Communicator& comm, bool mine) {
  const at::Tensor flag = at::full({1}, mine ? 1 : 0, at::kInt);
  FSDP_ASSIGN_OR_RETURN(auto work,
                        comm.AllReduce(flag, ReduceOp::kMin, "window"));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + absl::Seconds(30)));
  return flag.item<int>() != 0;
}

// Checks what each rank comes to when rank 1 gets `allocated` and `registered`.
// `num_registrations` counts those of all ranks.
absl::Status RunRanks(absl::Status allocated, absl::Status registered,
                      WindowOutcome expected, int* num_registrations) {
  std::atomic<int> count{0};
  const auto run = [&](Communicator& comm) -> absl::Status {
    const bool is_one = comm.rank() == 1;
    const auto allocate = [&] { return is_one ? allocated : absl::OkStatus(); };
    const auto register_window = [&] {
      ++count;
      return is_one ? registered : absl::OkStatus();
    };
    const auto true_on_all = [&](bool mine) { return TrueOnAll(comm, mine); };
    FSDP_ASSIGN_OR_RETURN(
        const WindowOutcome outcome,
        AgreeOnWindow({allocate, register_window, true_on_all}));
    if (outcome == expected) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("another outcome: ", static_cast<int>(outcome)));
  };
  absl::Status status = testing::RunAllRanks(kRanks, run);
  *num_registrations = count;
  return status;
}

TEST(WindowAgreementTest, AllHaveAWindowWhereAllCan) {
  int registrations = 0;
  EXPECT_OK(RunRanks(absl::OkStatus(), absl::OkStatus(), WindowOutcome::kWindow,
                     &registrations));
  EXPECT_EQ(registrations, kRanks);
}

TEST(WindowAgreementTest, NobodyRegistersWhereOneHasNoMemory) {
  int registrations = 0;
  EXPECT_OK(RunRanks(absl::ResourceExhaustedError("full"), absl::OkStatus(),
                     WindowOutcome::kNoMemory, &registrations));
  EXPECT_EQ(registrations, 0);
}

TEST(WindowAgreementTest, AllDoWithoutWhereOneIsRefused) {
  int registrations = 0;
  EXPECT_OK(RunRanks(absl::OkStatus(), absl::InternalError("no fabric"),
                     WindowOutcome::kRefused, &registrations));
  EXPECT_EQ(registrations, kRanks);
}

TEST(WindowAgreementTest, ARegistrationThatHangsEndsTheGroup) {
  int registrations = 0;
  EXPECT_THAT(
      RunRanks(absl::OkStatus(), absl::DeadlineExceededError("rank 2 is late"),
               WindowOutcome::kRefused, &registrations),
      ::fsdp::testing::StatusIs(absl::StatusCode::kDeadlineExceeded,
                                ::testing::HasSubstr("is late")));
}

}  // namespace
}  // namespace fsdp::comm
