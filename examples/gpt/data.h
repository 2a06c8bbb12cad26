// Reads a text, and cuts each rank's rows of a training step from it.
#ifndef EXAMPLES_GPT_DATA_H_
#define EXAMPLES_GPT_DATA_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gpt {

// Returns the folder of the text that is there without being asked for,
// LibTorch's C++ headers, which are among the runfiles of the program `argv0`.
// NotFound: the program was copied away from them.
absl::StatusOr<std::string> DefaultText(const std::string& argv0);

// Returns the bytes, as uint8 [bytes], of a file, or of all text files below a
// folder in the order of their paths; files with a zero byte are no text.
// InvalidArgument, naming `path`: there are not more than `seq` bytes.
absl::StatusOr<torch::Tensor> ReadText(const std::string& path, int64_t seq);

// Bytes as int64 [rows, seq], and the byte that follows each.
struct Batch {
  torch::Tensor inputs;
  torch::Tensor targets;
};

// The rank for which rows are cut, of so many ranks.
struct Share {
  int rank;
  int ranks;
  int64_t rows;  // of this rank
  int64_t seq;
};

// Returns rows from random places of `text`. They depend only on the step and
// the number of rows of all ranks, so that a run that goes on needs only its
// step.
Batch BatchOf(const torch::Tensor& text, int64_t step, const Share& share);

}  // namespace gpt

#endif  // EXAMPLES_GPT_DATA_H_
