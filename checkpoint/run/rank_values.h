// The values that belong to one rank and not to the model, in a file per rank.
#ifndef CHECKPOINT_RUN_RANK_VALUES_H_
#define CHECKPOINT_RUN_RANK_VALUES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/run/run.h"
#include "fsdp/state/model_values.h"

namespace fsdp::checkpoint {

// "ranks/rank-00002.safetensors" holds what TakeRankValues() returns,
// "ranks/buffers-00002.safetensors" what TakeWholeValues() returns.
std::string RankFileName(int rank);
std::string BuffersFileName(int rank);

// A small safetensors file in memory: named tensors, and texts as its metadata.
struct SmallFile {
  std::map<std::string, at::Tensor> tensors;  // on the CPU
  std::map<std::string, std::string> texts;
};

// Returns the bytes of the file. InvalidArgument: safetensors has no such
// dtype, or a text is not UTF-8.
absl::StatusOr<std::string> Format(const SmallFile& file);
absl::StatusOr<SmallFile> ParseSmallFile(absl::string_view bytes);

// Returns the states of the random generators of `device` and of the CPU, and
// the entries of this rank.
absl::StatusOr<SmallFile> TakeRankValues(const TrainingRun& run,
                                         c10::Device device);
// Puts them back, except for states of another device. InvalidArgument: a
// generator refuses a state.
absl::Status RestoreRankValues(const SmallFile& file, c10::Device device,
                               TrainingRun& run);

// Returns the values of buffers and of parameters that are not sharded, which
// may differ between ranks, copied to the CPU in the dtypes that they have
// without mixed precision.
SmallFile TakeWholeValues(const ModelValues& model);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_RANK_VALUES_H_
