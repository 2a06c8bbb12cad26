#include "comm/testing/run_refused_ranks.h"

#include "base/check.h"
#include "base/torch_status.h"

namespace fsdp::comm::testing {

std::vector<absl::Status> RunRefusedRanks(int world_size,
                                          const RankFunction& fn) {
  std::vector<absl::Status> refusals(world_size);
  const absl::Status ended =
      RunAllRanks(world_size, [&](Communicator& communicator) {
        absl::Status refusal;
        const absl::Status thrown =
            TorchToStatus("a rank", [&] { refusal = fn(communicator); });
        refusals[communicator.rank()] = thrown.ok() ? refusal : thrown;
        return absl::OkStatus();
      });
  FSDP_CHECK(ended.ok());
  return refusals;
}

}  // namespace fsdp::comm::testing
