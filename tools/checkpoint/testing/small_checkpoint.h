// Small models and checkpoints in every format, for tests.
#ifndef TOOLS_CHECKPOINT_TESTING_SMALL_CHECKPOINT_H_
#define TOOLS_CHECKPOINT_TESTING_SMALL_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint::tool::testing {

struct SmallTensor {
  TensorInfo info;
  std::string bytes;  // row-major
};

// Returns a tensor of dtype F32.
SmallTensor Floats(std::string name, std::vector<int64_t> shape,
                   const std::vector<float>& values);

// "w" F32[3, 4] with 0 to 11, "b" BF16[5] with ones, "scalar" F32[] with
// `scalar`, "empty" F32[0, 3] and "ids" I64[3] with -1, 0 and 1.
std::vector<SmallTensor> SmallModel(float scalar = 7);

// The files of a Hugging Face model by their names, after `stem`.
checkpoint::testing::Contents ModelFiles(absl::Span<const SmallTensor> model,
                                         const std::string& stem = "model",
                                         int64_t max_file_bytes = 1 << 20);

// Those into which `ranks` ranks write their shares of each tensor.
checkpoint::testing::Contents RankFiles(absl::Span<const SmallTensor> model,
                                        int ranks);

// Writes them into a new folder.
absl::Status WriteFolder(FileSystem& files, const std::string& folder,
                         const checkpoint::testing::Contents& contents);

// A committed checkpoint of a run: the model, as its optimizer's "exp_avg"
// the tensor "w", and files that have no tensors of the model.
absl::Status SaveRun(FileSystem& files, const std::string& root, int64_t step,
                     absl::Span<const SmallTensor> model);

// Changes a byte of a file.
absl::Status FlipByte(FileSystem& files, const std::string& path,
                      int64_t offset);

}  // namespace fsdp::checkpoint::tool::testing

#endif  // TOOLS_CHECKPOINT_TESTING_SMALL_CHECKPOINT_H_
