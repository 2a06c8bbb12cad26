// The refusals and messages of offloaded training, on all ranks.
#include <torch/optim/adamw.h>

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optimizer_check.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/trained_values.h"
#include "fsdp/tests/memory/offload_fault_plan.h"
#include "offload/param_store.h"

namespace fsdp::testing::offload_faults {
namespace {

TEST(OffloadFaultsTest, WhatIsHeldAcrossAStepIsRefusedOnAllRanks) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Values expected,
                          Undisturbed(world, /*two_groups=*/false));
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, Offloading(world.rank(), Plan())));
    FusedAdamW optimizer = MakeAdamW(model, /*two_groups=*/false);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      FSDP_RETURN_IF_ERROR(Backward(model, step));
      {
        Resident held;
        if (world.rank() == 1) {
          FSDP_ASSIGN_OR_RETURN(
              held, Resident::Of(model->Parameters().back(), Use::kRead));
        }
        const absl::Status refused = Step(optimizer);
        if (!absl::IsFailedPrecondition(refused) ||
            !absl::StrContains(refused.message(), "fsdp::Resident")) {
          return absl::InternalError(refused.ToString());
        }
      }
      FSDP_RETURN_IF_ERROR(Step(optimizer));
    }
    FSDP_ASSIGN_OR_RETURN(const Values actual, ValuesOf(*model, optimizer));
    return CheckEqual(actual, expected);
  }));
}

TEST(OffloadFaultsTest, ASecondOptimizerIsToldOfTheFirst) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, Offloading(world.rank(), Plan())));
    FusedAdamW first = MakeAdamW(model, /*two_groups=*/false);
    FusedAdamW second = MakeAdamW(model, /*two_groups=*/false);
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    FSDP_RETURN_IF_ERROR(Step(first));
    const absl::Status refused = Step(second);
    return Check(absl::IsAlreadyExists(refused) &&
                     absl::StrContains(refused.message(), "another optimizer"),
                 refused.ToString());
  }));
}

TEST(OffloadFaultsTest, AStoreThatCannotBeMadeIsRefusedOnAllRanks) {
  const std::vector<absl::Status> results =
      RunRanks(kRanks, [](Communicator& world) {
        OffloadOptions offload = Offloading(world.rank(), Plan());
        if (world.rank() == 1) {
          offload.make_store = [](RestingKind, int64_t)
              -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
            return absl::ResourceExhaustedError("the disk is full");
          };
        }
        return MakeModel(world, offload).status();
      });
  EXPECT_THAT(
      results,
      Each(StatusIs(
          absl::StatusCode::kResourceExhausted,
          HasSubstr("rank 1: making the store of parameters: the disk is "
                    "full"))));
}

TEST(OffloadFaultsTest, AnOptimizerWithMoreStateThanPlannedIsToldWhatToSet) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    OffloadOptions offload = Offloading(world.rank(), Plan());
    offload.optimizer_state = 0.001;
    offload.buffer_bytes = 4 << 20;
    Options options = BlockUnits();
    options.offload = offload;
    FSDP_ASSIGN_OR_RETURN(Model model, FullyShard(MakeNet(/*dim=*/160, 2),
                                                  Unowned(world), options));
    FusedAdamW optimizer(model->Parameters(), torch::optim::AdamWOptions(1e-2));
    const at::Tensor x = Rows(0, 3, 160);
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    const absl::Status status = Step(optimizer);
    return Check(absl::IsResourceExhausted(status) &&
                     absl::StrContains(status.message(), "optimizer_state"),
                 status.ToString());
  }));
}

TEST(OffloadFaultsTest, AnotherOptimizerIsToldWhichOnesCan) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          MakeModel(world, Offloading(world.rank(), Plan())));
    torch::optim::AdamW optimizer(model->Parameters());
    FSDP_RETURN_IF_ERROR(
        CheckThat(CheckOptimizer(*model, optimizer),
                  StatusIs(absl::StatusCode::kFailedPrecondition, _),
                  "status of CheckOptimizer()"));
    FSDP_RETURN_IF_ERROR(
        CheckOptimizer(*model, FusedAdamW(model->Parameters())));
    const at::Tensor x = Rows(0, 3, kDim);
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    const absl::Status status =
        TorchToStatus("step", [&] { optimizer.step(); });
    return Check(absl::IsFailedPrecondition(status) &&
                     absl::StrContains(status.message(), "FusedAdamW"),
                 status.ToString());
  }));
}

}  // namespace
}  // namespace fsdp::testing::offload_faults
