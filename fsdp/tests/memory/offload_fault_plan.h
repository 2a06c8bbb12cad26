// Training whose stores fail as a plan says.
#ifndef FSDP_TESTS_MEMORY_OFFLOAD_FAULT_PLAN_H_
#define FSDP_TESTS_MEMORY_OFFLOAD_FAULT_PLAN_H_

#include <torch/optim/adamw.h>

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/trained_values.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing::offload_faults {

using ::fsdp::offload::testing::Fault;
using Model = FullyShardedDataParallel<NetImpl>;

inline constexpr int kRanks = 2;
inline constexpr int64_t kDim = 5;
inline constexpr int kSteps = 4;
inline constexpr char kInjected[] = "injected failure";

// The faults of one rank's store of one kind.
struct Plan {
  int rank = 0;
  RestingKind kind = RestingKind::kOptimizer;
  std::vector<Fault> faults;
  // These rest in stores; everything else stays in memory.
  enum class Away { kAll, kStates, kParameters, kGradients };
  Away away = Away::kAll;
  bool two_groups = false;
  // With so few pages, every use is a transfer.
  int64_t buffer_pages = 10;
};

using Away = Plan::Away;

OffloadOptions Offloading(int rank, const Plan& plan);

absl::StatusOr<Model> MakeModel(Communicator& world,
                                const OffloadOptions& offload);

// With two groups, each unit has parameters in both.
FusedAdamW MakeAdamW(Model& model, bool two_groups);

absl::Status Backward(Model& model, int step);

absl::Status Step(FusedAdamW& optimizer);

// Returns the values at the end of an undisturbed run.
absl::StatusOr<Values> Undisturbed(Communicator& world, bool two_groups);

}  // namespace fsdp::testing::offload_faults

#endif  // FSDP_TESTS_MEMORY_OFFLOAD_FAULT_PLAN_H_
