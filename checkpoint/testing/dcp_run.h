// A small training on three ranks that FSDP2 takes over, or takes from it, by
// way of tools/interop/dcp.py. check_with_python.py has the same model, data
// and optimizers.
#ifndef CHECKPOINT_TESTING_DCP_RUN_H_
#define CHECKPOINT_TESTING_DCP_RUN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fsdp::checkpoint::testing {

struct DcpRun {
  std::string folder;     // of checkpoints
  std::string optimizer;  // "AdamW", "Adam", "SGD"
};

// Five steps, a checkpoint, and the losses of five further ones.
absl::StatusOr<std::vector<double>> SaveAndGoOn(const DcpRun& run);

// From a checkpoint of five steps: the losses of five further ones.
absl::StatusOr<std::vector<double>> LoadAndGoOn(const DcpRun& run);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTING_DCP_RUN_H_
