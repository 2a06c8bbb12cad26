// The options of a training run.
#ifndef TESTING_GPT_FLAGS_OPTIONS_H_
#define TESTING_GPT_FLAGS_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "fsdp/options/offload_options.h"

namespace gpt {

// Shape of the model.
struct GptConfig {
  int64_t vocab = 256;
  int64_t dim = 256;  // a multiple of heads
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t seq = 64;  // the longest input
};

enum class Backend { kAuto, kLocal, kSharedMemory, kGloo };
enum class Device { kCpu, kCuda };
// With kNone each rank is on its own; others are as fsdp::ShardingStrategy.
enum class Sharding { kFull, kGradients, kOptimizer, kReplicated, kNone };
// A run is started again with as many ranks, or without those that have failed.
enum class RestartRanks { kSame, kFewer };
enum class ComputeDtype { kFloat, kBFloat16 };

// The value of --data that asks for synthetic data.
inline constexpr absl::string_view kCountDataName = "count";

struct TrainOptions {
  GptConfig model;
  int ranks = 2;
  Backend backend = Backend::kAuto;
  Device device = Device::kCpu;
  bool staged = false;
  Sharding sharding = Sharding::kFull;
  ComputeDtype precision = ComputeDtype::kFloat;
  fsdp::OffloadOptions offload;  // not with kNone
  bool recompute = false;        // of blocks in backward; not with kNone
  // Chooses sharding, prefetching, recomputation and what rests in files so
  // that a rank takes at most auto_memory bytes. It may use offload.directory
  // if that is set.
  bool automatic = false;
  int64_t auto_memory = 0;
  int64_t batch = 4;  // rows per rank and step
  int64_t steps = 900;
  int64_t warmup = 2;
  uint64_t seed = 0;
  double lr = 3e-4;
  // Each block on rank jitter_rank takes longer by a random part up to this.
  double jitter = 0;
  int jitter_rank = 0;
  int threads = 0;   // per rank; 0: the host's cores divided among its ranks
  std::string data;  // a path or kCountDataName; empty: LibTorch's headers
  std::string json;  // a path; empty: none
  std::string save_init;   // a path; empty: none
  std::string init;        // a file or a folder
  std::string save;        // a folder of checkpoints; empty: none
  int64_t save_every = 0;  // steps; 0: the last one only
  bool save_async = true;
  int64_t keep_last = 0;  // checkpoints; 0: all
  bool object_store = false;
  bool resume = false;
  int max_restarts = 0;  // by the program that starts the ranks
  RestartRanks restart_ranks = RestartRanks::kSame;
  int min_ranks = 1;
  int replicas = 0;             // at the same time; 0: none
  std::string replica_history;  // a folder; empty: none
  std::string replica_replay;   // a folder; empty: none
  std::string export_dir;       // a new folder; empty: none
  std::string trace;            // a path; empty: none
  int64_t trace_steps = 5;      // the last ones are recorded
  int64_t sample = 300;         // bytes
};

// InvalidArgument, naming the flag, its value and what is expected.
absl::Status CheckOptions(const TrainOptions& options);

}  // namespace gpt

#endif  // TESTING_GPT_FLAGS_OPTIONS_H_
