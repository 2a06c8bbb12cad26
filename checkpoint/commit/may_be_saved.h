// What is said of a step whose commit has neither succeeded nor been undone.
#ifndef CHECKPOINT_COMMIT_MAY_BE_SAVED_H_
#define CHECKPOINT_COMMIT_MAY_BE_SAVED_H_

#include <cstdint>

#include "absl/status/status.h"

namespace fsdp::checkpoint {

// `why`, an error, with "; step N may be saved all the same" at its end.
absl::Status MayBeSaved(const absl::Status& why, int64_t step);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_MAY_BE_SAVED_H_
