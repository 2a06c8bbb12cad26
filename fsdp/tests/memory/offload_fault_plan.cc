#include "fsdp/tests/memory/offload_fault_plan.h"

#include <torch/optim/adamw.h>

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/trained_values.h"
#include "offload/host_store.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing::offload_faults {

OffloadOptions Offloading(int rank, const Plan& plan) {
  OffloadOptions offload;
  offload.parameters = offload.gradients = offload.optimizer = Tier::kSsd;
  const auto here = [&](Away kind) {
    return plan.away != Away::kAll && plan.away != kind;
  };
  if (here(Away::kParameters)) offload.parameters = Tier::kDevice;
  if (here(Away::kGradients)) offload.gradients = Tier::kDevice;
  if (here(Away::kStates)) offload.optimizer = Tier::kDevice;
  offload.buffer_bytes = plan.buffer_pages * offload::kPageBytes;
  offload.make_store = [rank, plan](RestingKind kind, int64_t capacity)
      -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
    FSDP_ASSIGN_OR_RETURN(
        std::unique_ptr<offload::ParamStore> store,
        offload::HostStore::Make(capacity, offload::PageAllocator::System(),
                                 /*rollback=*/true));
    if (rank != plan.rank || kind != plan.kind) return store;
    return offload::testing::WithFaults(std::move(store), plan.faults);
  };
  return offload;
}

absl::StatusOr<Model> MakeModel(Communicator& world,
                                const OffloadOptions& offload) {
  Options options = BlockUnits();
  options.offload = offload;
  return FullyShard(MakeNet(kDim, /*num_blocks=*/2), Unowned(world), options);
}

FusedAdamW MakeAdamW(Model& model, bool two_groups) {
  const torch::optim::AdamWOptions options(1e-2);
  std::vector<at::Tensor> groups[2];
  int next = 0;
  for (const at::Tensor& shard : model->Parameters()) {
    groups[two_groups ? next++ % 2 : 0].push_back(shard);
  }
  FusedAdamW optimizer(groups[0], options);
  if (two_groups) {
    optimizer.add_param_group(
        {groups[1], std::make_unique<torch::optim::AdamWOptions>(
                        torch::optim::AdamWOptions(1e-3).weight_decay(0))});
  }
  return optimizer;
}

absl::Status Backward(Model& model, int step) {
  const int rank = model->communicator().rank();
  const at::Tensor x = Rows(int64_t{3} * (step * kRanks + rank), 3, kDim);
  absl::Status status;
  status.Update(TorchToStatus("forward", [&] {
    status = model->Backward(Loss(model->forward(x), x));
  }));
  return status;
}

absl::Status Step(FusedAdamW& optimizer) {
  return TorchToStatus("step", [&] { optimizer.step(); });
}

absl::StatusOr<Values> Undisturbed(Communicator& world, bool two_groups) {
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, OffloadOptions()));
  FusedAdamW optimizer = MakeAdamW(model, two_groups);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(Backward(model, step));
    FSDP_RETURN_IF_ERROR(Step(optimizer));
  }
  return ValuesOf(*model, optimizer);
}

}  // namespace fsdp::testing::offload_faults
