// Runs replicas for replica_kills_test.py, which kills these processes.
//   kills_trainer FOLDER STEPS REPLICAS RANKS [HISTORY]
// Each rank appends a line to FOLDER/replica-0.rank-1 for each step that it has
// finished: the step and a hash of the bits of its shards after it.
#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "replicas/launcher/run_replicas.h"
#include "replicas/replicas.h"

namespace fsdp {
namespace {

constexpr int64_t kDim = 32;
constexpr int64_t kRows = 4;

uint64_t HashOf(const std::vector<at::Tensor>& shards) {
  uint64_t hash = kFnv1a;
  for (const at::Tensor& shard : shards) {
    hash = Fnv1a({static_cast<const char*>(shard.data_ptr()), shard.nbytes()},
                 hash);
  }
  return hash;
}

absl::Status Train(const std::string& folder, const ReplicaOptions& options,
                   const std::shared_ptr<comm::Communicator>& ranks,
                   const comm::Environment& environment) {
  const int seed = 100 * environment.replica + environment.replica_incarnation;
  FSDP_ASSIGN_OR_RETURN(
      auto model, FullyShard(testing::MakeNet(kDim, /*num_blocks=*/3, seed),
                             ranks, testing::BlockUnits()));
  torch::optim::AdamW optimizer(model->Parameters(),
                                torch::optim::AdamWOptions(0.01));
  checkpoint::TrainingRun run;
  run.model = model.get();
  run.optimizer = &optimizer;
  FSDP_ASSIGN_OR_RETURN(auto replicas,
                        Replicas::Join(environment, &run, options));
  std::ofstream log(absl::StrCat(folder, "/replica-", environment.replica,
                                 ".rank-", ranks->rank()),
                    std::ios::app);
  for (;;) {
    FSDP_ASSIGN_OR_RETURN(const auto step, replicas->BeginStep());
    if (!step.has_value()) return absl::OkStatus();
    const int64_t part =
        (step->step * step->size + step->index) * ranks->world_size() +
        ranks->rank();
    const at::Tensor x = testing::Rows(part * kRows, kRows, kDim);
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(testing::Loss(model->forward(x), x)));
    FSDP_RETURN_IF_ERROR(replicas->FinishStep());
    optimizer.step();
    log << absl::StrCat(step->step, " ", absl::Hex(HashOf(model->Parameters())),
                        " ", replicas->Members(), "\n")
        << std::flush;
  }
}

int Main(int argc, char** argv) {
  FSDP_CHECK(argc >= 5);
  const std::string folder = argv[1];
  ReplicaOptions options;
  options.steps = std::atoi(argv[2]);
  options.replay = argc > 5 ? argv[5] : "";
  if (options.replay.empty()) options.history_folder = folder + "/history";
  options.loss_timeout = absl::Seconds(5);
  comm::RestartOptions restarts;
  restarts.max_restarts = 1'000'000;
  restarts.max_without_progress = 1'000'000;
  restarts.pause = restarts.longest_pause = absl::Milliseconds(10);
  return replicas::RunReplicas(
      argc, argv, {std::atoi(argv[3]), std::atoi(argv[4])},
      [&](const auto& ranks, const auto& environment) {
        return Train(folder, options, ranks, environment);
      },
      {}, restarts);
}

}  // namespace
}  // namespace fsdp

int main(int argc, char** argv) { return fsdp::Main(argc, argv); }
