// The command line of //examples/llama:train.
#ifndef EXAMPLES_LLAMA_FLAGS_TRAIN_FLAGS_H_
#define EXAMPLES_LLAMA_FLAGS_TRAIN_FLAGS_H_

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "adapters/lora.h"
#include "examples/llama/flags/command_line.h"
#include "fsdp/options/offload_options.h"

namespace llama {

enum class Rows { kStream, kPacked };
inline FlagNames<Rows> NamesOf(Rows) {
  return {{Rows::kStream, "stream"}, {Rows::kPacked, "packed"}};
}

enum class Resume { kNo, kIfThere, kRequired };
inline FlagNames<Resume> NamesOf(Resume) {
  return {{Resume::kIfThere, "true"},
          {Resume::kNo, "false"},
          {Resume::kRequired, "required"}};
}

struct TrainFlags {
  std::string model;
  bool from_scratch = false;
  std::string data;
  std::string eval_data;
  Rows rows = Rows::kStream;

  int ranks = 2;
  c10::DeviceType device = c10::DeviceType::CPU;
  int threads = 0;  // 0: the host's cores divided among its ranks
  int64_t seq = 256;
  int64_t batch = 8;  // rows of all ranks
  int64_t micro_batches = 1;
  bool no_sync = false;
  int64_t steps = 100;
  uint64_t seed = 1;

  double lr = 2e-5;
  int64_t warmup = 10;
  double lr_floor = 0.1;
  double weight_decay = 0.1;
  double clip = 1;
  Precision precision = Precision::kOfDevice;
  bool recompute = false;
  bool automatic = false;      // choose how the model is sharded
  double auto_memory_gib = 0;  // of a rank
  double auto_host_gib = 0;    // of the host's memory, for a rank
  fsdp::OffloadOptions offload;
  bool capture = false;

  std::optional<fsdp::adapters::LoraConfig> lora;
  std::string adapter;  // a folder to begin from, whose config `lora` then is
  Base base = Base::kPrecision;
  int64_t base_block = 64;

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
};

// Reads the flags; exits for --help and flags that cannot be parsed. Resolves
// relative paths as the user meant them, also under `bazel run`.
// InvalidArgument: a number is impossible, or a flag needs or excludes another.
absl::StatusOr<TrainFlags> ReadTrainFlags(int argc, char** argv);

// Parses none, cpu or ssd, or one of them for some of the kinds of memory, such
// as parameters=ssd,optimizer=cpu. InvalidArgument: other words.
absl::StatusOr<fsdp::OffloadOptions> ParseOffload(absl::string_view text);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_TRAIN_FLAGS_H_
