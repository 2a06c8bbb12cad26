// Groups of an optimizer as PyTorch's Distributed Checkpoint (DCP) has them.
#ifndef CHECKPOINT_SAVE_DCP_GROUPS_H_
#define CHECKPOINT_SAVE_DCP_GROUPS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/save/dcp_export.h"
#include "fsdp/state/optimizer_values.h"

namespace fsdp::checkpoint {

// The options of each group and the names of its parameters, as the state dict
// of the class of that name in torch.optim has them; options that LibTorch
// lacks have PyTorch's defaults. kTorchtitan: an entry for each parameter.
// InvalidArgument: an optimizer of another class, or a number that is not
// finite.
absl::StatusOr<std::vector<DcpWriteValue>> DcpGroupValues(
    DcpNames names, absl::Span<const OptimizerGroup> groups);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_DCP_GROUPS_H_
