// A text, and each rank's part of the rows that a step trains on.
#ifndef EXAMPLES_GPT_DATA_H_
#define EXAMPLES_GPT_DATA_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gpt {

// The folder of LibTorch's C++ headers, which are among the runfiles of the
// program `argv0`. NotFound where the program was copied away from them.
absl::StatusOr<std::string> DefaultText(const std::string& argv0);

// The bytes, as uint8 [bytes], of a file, or of all text files below a folder
// in the order of their paths; those with a zero byte in them are none. More
// than `seq` bytes; InvalidArgument names `path` where there are fewer.
absl::StatusOr<torch::Tensor> ReadText(const std::string& path, int64_t seq);

// Bytes as int64 [rows, seq], and for each the one that follows it.
struct Batch {
  torch::Tensor inputs;
  torch::Tensor targets;
};

// What one of so many ranks trains on in a step.
struct Share {
  int rank;
  int ranks;
  int64_t rows;  // of this rank
  int64_t seq;
};

// Rows from random places of `text`. They depend on the step and on the number
// of rows of all ranks alone: a run that goes on needs no more than its step.
Batch BatchOf(const torch::Tensor& text, int64_t step, const Share& share);

}  // namespace gpt

#endif  // EXAMPLES_GPT_DATA_H_
