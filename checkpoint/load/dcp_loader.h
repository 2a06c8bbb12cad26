// A DCP checkpoint into a run: its model and its optimizer.
#ifndef CHECKPOINT_LOAD_DCP_LOADER_H_
#define CHECKPOINT_LOAD_DCP_LOADER_H_

#include "absl/status/status.h"
#include "checkpoint/load/run_loader.h"
#include "checkpoint/run/run.h"

namespace fsdp::checkpoint {

// Fills the model of `run`, and its optimizer, if there is one, from the folder
// `context.root`. Two agreements: nothing is changed before the first one.
// Errors as those of LoadDcp() (dcp_files.h).
absl::Status LoadDcpRun(const LoadContext& context, const TrainingRun& run);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_DCP_LOADER_H_
