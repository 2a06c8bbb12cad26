// One rank of the program //examples/llama:train.
#ifndef EXAMPLES_LLAMA_TRAIN_RUN_H_
#define EXAMPLES_LLAMA_TRAIN_RUN_H_

#include <memory>

#include "absl/status/status.h"
#include "comm/communicator.h"
#include "examples/llama/flags/train_flags.h"

namespace llama {

// Reads model and data, trains, measures, saves and exports, as `flags` say.
// Rank 0 tells of it on standard output. Collective.
absl::Status TrainRank(const TrainFlags& flags,
                       const std::shared_ptr<fsdp::comm::Communicator>& ranks);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAIN_RUN_H_
