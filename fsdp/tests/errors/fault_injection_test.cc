// Training fails at each of its points: in user code, autograd, hooks and
// collectives. If all ranks fail alike, the next step is that of a model that
// has never failed, bit by bit. A parameter is never half written.

#include "fsdp/testing/fault_injector.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/errors/fault_cases.h"
#include "fsdp/tests/errors/fault_checks.h"

namespace fsdp::faults {
namespace {

constexpr FaultType kFaultTypes[] = {FaultType::kStatus, FaultType::kUsers,
                                     FaultType::kTorch};

bool IsNamedAbort(const absl::Status& status, const FaultInjector& injector) {
  return absl::IsAborted(status) &&
         absl::StrContains(status.message(), injector.text());
}

// Returns whether the iteration has reached the fault.
absl::StatusOr<bool> CheckOneFault(const Case& c, Trainer& trainer,
                                   Trainer& reference, int64_t point,
                                   FaultType type) {
  FaultInjector& injector = *trainer.injector;
  const Values before = ShardsOf(trainer);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, point).status);
  injector.Arm(point, type);
  const Outcome outcome = Iterate(c, trainer, point);
  injector.Disarm();
  if (injector.failed_at().empty()) {
    FSDP_RETURN_IF_ERROR(outcome.status);
    FSDP_RETURN_IF_ERROR(CheckSame(trainer, reference));
    return false;
  }
  const bool in_user_code =
      c.iterate == &TrainByPlainBackward || !injector.failed_in_backward();
  const bool keeps_type = in_user_code && c.iterate != &EditEach &&
                          injector.failed_at() != FaultInjector::kAllocation;
  FSDP_RETURN_IF_ERROR(CheckReported(outcome, injector, type, keeps_type));
  // Whole gradients of backwards before outlive a failure.
  trainer.model->zero_grad();
  if (c.frees_at_failure) FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
  FSDP_RETURN_IF_ERROR(
      CheckNotTorn(trainer, {before, c.edits ? ShardsOf(reference) : before}));
  // The next step must not use values of the failed iteration.
  for (const at::Tensor& values : before) values.mul_(0.75);
  SetShards(trainer, before);
  SetShards(reference, before);
  const absl::Status next = Iterate(c, trainer, point).status;
  if (c.outside_iteration && IsNamedAbort(next, injector)) return true;
  FSDP_RETURN_IF_ERROR(next);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, point).status);
  FSDP_RETURN_IF_ERROR(CheckSame(trainer, reference));
  FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
  return true;
}

// Returns whether any rank has reached the fault.
absl::StatusOr<bool> CheckFaults(const Case& c, Communicator& world,
                                 FaultInjector* injector, int64_t first_point,
                                 FaultType type) {
  FaultInjector never;
  FSDP_ASSIGN_OR_RETURN(Trainer trainer, MakeTrainer(c, world, injector));
  FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
  for (int64_t point = first_point;; ++point) {
    const absl::StatusOr<bool> failed =
        CheckOneFault(c, trainer, reference, point, type);
    if (!failed.ok()) {
      return Annotate(failed.status(), absl::StrCat("point ", point, ", ",
                                                    injector->failed_at()));
    }
    if (!*failed || c.outside_iteration) return *failed;
  }
}

class FaultInjectionTest : public ::testing::TestWithParam<Case> {};

TEST_P(FaultInjectionTest, RanksThatFailAlikeGoOnAsIfTheyNeverHad) {
  Case c = GetParam();
  c.options.abort_on_failure = false;
  for (const FaultType type : kFaultTypes) {
    SCOPED_TRACE(type);
    bool goes_on = true;
    for (int64_t point = 0; goes_on; ++point) {
      Group group(c.world, /*aborts=*/false);
      goes_on = false;
      ASSERT_OK(group.Run([&](Communicator& world) {
        return CheckFaults(c, world, group.injector(world.rank()), point, type)
            .status();
      }));
      goes_on = c.outside_iteration && group.has_failed();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, FaultInjectionTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::faults
