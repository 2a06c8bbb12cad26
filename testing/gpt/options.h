// The options of a training run, and the command line that says them.
#ifndef TESTING_GPT_OPTIONS_H_
#define TESTING_GPT_OPTIONS_H_

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/startup/environment.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/options/options.h"
#include "testing/gpt/model.h"

namespace gpt {

struct TrainOptions {
  GptConfig model;
  int ranks = 2;
  fsdp::comm::Backend backend = fsdp::comm::Backend::kAuto;
  c10::DeviceType device = c10::DeviceType::CPU;
  // None: each rank is on its own.
  std::optional<fsdp::ShardingStrategy> sharding =
      fsdp::ShardingStrategy::kFullShard;
  fsdp::OffloadOptions offload;  // only where there is sharding
  // Chooses sharding, prefetching, recomputation and what rests in files so
  // that a rank takes at most auto_memory bytes. It may use offload.directory
  // if that is set.
  bool automatic = false;
  int64_t auto_memory = 0;
  int64_t batch = 4;  // rows per rank and step
  int64_t steps = 900;
  int64_t warmup = 2;
  uint64_t seed = 0;
  int threads = 0;   // per rank; 0: the host's cores divided among its ranks
  std::string json;  // a path; empty: none
  std::string save_init;   // a path; empty: none
  std::string init;        // a file or a folder
  std::string save;        // a folder of checkpoints; empty: none
  int64_t save_every = 0;  // steps; 0: the last one only
  bool save_async = true;
  int64_t keep_last = 0;  // checkpoints; 0: all
  bool object_store = false;
  bool resume = false;
  int max_restarts = 0;         // by the program that starts the ranks
  bool restart_fewer = false;   // without the ranks that have failed
  int replicas = 0;             // at the same time; 0: none
  std::string replica_history;  // a folder; empty: none
  std::string replica_replay;   // a folder; empty: none
  std::string export_dir;       // a new folder; empty: none
  std::string trace;            // a path; empty: none
  int64_t trace_steps = 5;      // the last ones are recorded
};

// Reads and checks the flags; "--save-init" is accepted for "--save_init".
// Relative paths become those the user meant, also under `bazel run`, which
// changes the working directory. Exits with a message for --help and for flags
// that absl cannot parse. InvalidArgument, naming the flag and what is
// expected, for all else.
absl::StatusOr<TrainOptions> ParseFlags(int argc, char** argv);

// Returns `options` as they are for this process. In a replica, by the
// environment, files and folders that each replica writes for itself get its
// number, and options.replicas is how many there are. Returns InvalidArgument
// if what was started is not what the flags ask for, or if they are for
// replicas only.
absl::StatusOr<TrainOptions> OptionsOfReplica(
    TrainOptions options, const fsdp::comm::Environment& environment);

}  // namespace gpt

#endif  // TESTING_GPT_OPTIONS_H_
