// What DCP checkpoints have of an optimizer.
#ifndef CHECKPOINT_DCP_DCP_OPTIMIZER_H_
#define CHECKPOINT_DCP_DCP_OPTIMIZER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/json.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

struct DcpGroup {
  std::vector<std::string> names;  // of parameters
  // "lr", "betas" and so on: None, bools, numbers and texts, and lists of them.
  // A text stands for what is of any other class.
  std::map<std::string, Json> options;
};

struct DcpOptimizer {
  // States that are tensors, by the state's name: those of parameters, by the
  // parameter's name.
  std::map<std::string, Catalog> slots;
  // States that are numbers, by parameter: {"weight": {"step": 7}}.
  std::map<std::string, std::map<std::string, int64_t>> numbers;
  std::vector<DcpGroup> groups;
  // Each of `groups` is of one parameter, as in the flattened state dicts of
  // torchtitan, which do not say what groups there were.
  bool is_flattened = false;
};

// Of the folder that `metadata` is of; nothing where there is no optimizer. It
// is in the item "optim" or "optimizer": "optim.state.NAME.exp_avg" and
// "optim.param_groups.0.lr", or, flattened, "optim.param_groups.NAME.lr". The
// state "step" is a number; other tensors are only found. Reads each number and
// each option. Memory is in proportion to what files have of them.
// InvalidArgument, naming file and value: two optimizers, one as Megatron keeps
// it, a step that is no count, values that overlap, and what FindDcpTensors()
// and ReadDcpValue() refuse.
absl::StatusOr<DcpOptimizer> ReadDcpOptimizer(FileSystem& files,
                                              const std::string& folder,
                                              const DcpMetadata& metadata);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_DCP_OPTIMIZER_H_
