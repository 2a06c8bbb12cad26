// A training step of a GPT, sharded and in plain LibTorch, in turns on one
// device; --ranks=N plays N ranks (comm/loopback_communicator.h). The default
// model has a billion parameters. `host_cost`: of layers that compute next to
// nothing, so that the host is what is waited for.
//   ./bazelw run --config=opt --config=cuda //benchmarks:gpu_train_step
#include <string>

#include "absl/flags/flag.h"
#include "benchmarks/gpu_run.h"
#include "benchmarks/gpu_train_step_run.h"

ABSL_FLAG(int, layers, 20, "Blocks of the model.");
ABSL_FLAG(int, dim, 2048, "Width of the model, a multiple of --heads.");
ABSL_FLAG(int, heads, 16, "Heads of the attention.");
ABSL_FLAG(int, seq, 1024, "Tokens of a row.");
ABSL_FLAG(int, batch, 4, "Rows of a step.");
ABSL_FLAG(int, vocab, 8192, "Different tokens.");

namespace fsdp::benchmarks {
namespace {

void Add(const std::string& name, const TrainStepCase& what, const Place& place,
         int turns) {
  AddBenchmark(name, turns,
               [what, place] { return MakeTrainStepRun(what, place); });
}

void AddAll(const Place& place, int turns) {
  TrainStepCase what;
  what.model = {absl::GetFlag(FLAGS_vocab), absl::GetFlag(FLAGS_dim),
                absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_heads),
                absl::GetFlag(FLAGS_seq)};
  what.batch = absl::GetFlag(FLAGS_batch);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    for (const bool checkpointing : {false, true}) {
      what.dtype = dtype;
      what.checkpointing = checkpointing;
      Add(std::string("train_step/") + (dtype == at::kFloat ? "fp32" : "bf16") +
              (checkpointing ? "/checkpointing" : ""),
          what, place, turns);
    }
  }
  TrainStepCase small;
  small.model = {/*vocab=*/64, /*dim=*/64, /*layers=*/50, /*heads=*/4,
                 /*seq=*/16};
  small.batch = 1;
  Add("host_cost", small, place, turns);
}

}  // namespace
}  // namespace fsdp::benchmarks

int main(int argc, char** argv) {
  return fsdp::benchmarks::RunBenchmarks(argc, argv, fsdp::benchmarks::AddAll);
}
