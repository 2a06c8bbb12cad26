// What belongs to one rank and not to the model: a file of its own.
#ifndef CHECKPOINT_RUN_RANK_VALUES_H_
#define CHECKPOINT_RUN_RANK_VALUES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/run/run.h"
#include "fsdp/state/model_values.h"

namespace fsdp::checkpoint {

inline constexpr char kRanksFolder[] = "ranks";
// "ranks/rank-00002.safetensors": of TakeRankValues(), and of
// TakeWholeValues().
std::string RankFileName(int rank);
std::string BuffersFileName(int rank);

// A small safetensors file in memory: named tensors, and texts as its metadata.
struct SmallFile {
  std::map<std::string, at::Tensor> tensors;  // on the CPU
  std::map<std::string, std::string> texts;
};

// InvalidArgument: a dtype that no file has, or texts that are not UTF-8.
absl::StatusOr<std::string> Format(const SmallFile& file);
absl::StatusOr<SmallFile> ParseSmallFile(absl::string_view bytes);

// The states of random generators, `device`'s and the CPU's, and the entries of
// this rank.
absl::StatusOr<SmallFile> TakeRankValues(const TrainingRun& run,
                                         c10::Device device);
// Puts them back. What there is of another device is left out. InvalidArgument:
// a state that a generator does not take.
absl::Status RestoreRankValues(const SmallFile& file, c10::Device device,
                               TrainingRun& run);

// The values of buffers and of parameters that are not sharded, which may
// differ between ranks, copied to the CPU, in the dtypes they have without
// mixed precision.
SmallFile TakeWholeValues(const ModelValues& model);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_RANK_VALUES_H_
