// The command line and the work of the program //examples/llama:train.
#ifndef EXAMPLES_LLAMA_TRAIN_RUN_H_
#define EXAMPLES_LLAMA_TRAIN_RUN_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/device_graph.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "examples/llama/training/model.h"
#include "examples/llama/training/trainer.h"

namespace llama {

enum class Resume { kNo, kIfThere, kRequired };

struct TrainFlags {
  std::string model;
  bool from_scratch = false;
  std::string data;
  std::string eval_data;
  bool packed = false;  // rows are of whole documents

  int ranks = 2;
  c10::DeviceType device = c10::DeviceType::CPU;
  int threads = 0;  // 0: the host's cores divided among its ranks
  int64_t seq = 256;
  int64_t batch = 8;  // rows of all ranks
  uint64_t seed = 1;

  // The flags that these have members for, and nothing else of them.
  TrainerOptions trainer = {2e-5,
                            {/*warm_up=*/10, /*steps=*/100, /*floor=*/0.1}};
  ModelOptions made;
  std::optional<c10::ScalarType> precision;  // unset: what is fast
  bool capture = false;
  std::string adapter;  // a folder to begin from, whose config is made.lora

  int64_t log_every = 10;
  int64_t eval_every = 0;
  std::string metrics;
  std::string save;
  int64_t save_every = 0;
  int64_t keep_last = 2;
  Resume resume = Resume::kNo;
  int64_t skip_nonfinite = 0;
  int max_restarts = 0;
  std::string export_dir;
  std::string save_adapter;

  int64_t steps() const { return trainer.schedule.steps; }
};

// Reads the flags; exits for --help and flags that cannot be parsed. Resolves
// relative paths as the user meant them, also under `bazel run`.
// InvalidArgument: a number is impossible, or a flag needs or excludes another.
absl::StatusOr<TrainFlags> ReadTrainFlags(int argc, char** argv);

// Runs one rank's part, on its device. --capture needs `make_graph`.
// Collective.
absl::Status TrainRank(const TrainFlags& flags, c10::Device device,
                       const std::shared_ptr<fsdp::comm::Communicator>& ranks,
                       const fsdp::DeviceGraphMaker& make_graph = nullptr);

// Runs the program and returns its exit code. Both functions are null in a
// program without CUDA.
int TrainProgram(int argc, char** argv,
                 const fsdp::comm::NcclOn& nccl_on = nullptr,
                 const fsdp::DeviceGraphMaker& make_graph = nullptr);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAIN_RUN_H_
