// How far a run has got, for whoever watches it.
#ifndef CHECKPOINT_NEWEST_STEP_H_
#define CHECKPOINT_NEWEST_STEP_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace fsdp::checkpoint {

// The step that Checkpointer::LoadLatest() would load from `folder`; none where
// there is no checkpoint, or no folder. Reads names, and a manifest where
// checkpoints are committed by them, from any process, also while a run saves;
// needs no LibTorch.
absl::StatusOr<std::optional<int64_t>> NewestStep(const std::string& folder);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_NEWEST_STEP_H_
