// The command line of the program.
#ifndef EXAMPLES_GPT_FLAGS_H_
#define EXAMPLES_GPT_FLAGS_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "examples/gpt/model.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace gpt {

struct Flags {
  std::string data;  // a file or a folder
  int64_t steps = 900;
  int64_t batch = 4;  // rows per rank and step
  GptConfig model;
  double lr = 3e-4;
  bool bf16 = false;
  fsdp::Tier offload = fsdp::Tier::kDevice;
  torch::DeviceType device = torch::kCPU;
  int ranks = 2;
  std::string save;        // a folder of checkpoints; empty: none
  int64_t save_every = 0;  // steps; 0: only at the end
  bool resume = false;
  std::string export_folder;  // a new folder; empty: none
};

// InvalidArgument names the flag that has an impossible value.
absl::StatusOr<Flags> ReadFlags(int argc, char** argv);

}  // namespace gpt

#endif  // EXAMPLES_GPT_FLAGS_H_
