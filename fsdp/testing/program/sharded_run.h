// One rank of a sharded Program. Used by sharded_program.cc alone, which runs
// the steps; sharded_calls.cc has the calls between them.
#ifndef FSDP_TESTING_PROGRAM_SHARDED_RUN_H_
#define FSDP_TESTING_PROGRAM_SHARDED_RUN_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/options/options.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/schedule/testing/choices.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_model.h"
#include "fsdp/testing/program/program_optimizers.h"

namespace fsdp::testing {

// The options of FullyShard() for a Program.
Options OptionsOf(const Program& program, const std::string& directory);
std::vector<comm::MeshDimension> MeshOf(const Program& program);

// Returns the tolerance to plain LibTorch's numbers, absolute and relative.
double ToleranceOf(const Program& program);

class ShardedRun {
 public:
  ShardedRun(const Program& program, const ProgramRecord& record,
             comm::Communicator& world, const std::string& directory);

  absl::Status Run();

 private:
  struct Micro {
    at::Tensor leaf;  // the batch
    at::Tensor loss;
  };
  struct Snapshot {
    StateDict whole;
    std::optional<ShardedStateDict> pieces;
    std::string saved;
    OptimizerStateDict optimizer;
    bool taken = false;
  };

  // --- Steps ---------------------------------------------------------------
  absl::Status Create();
  void MakeOptimizersAnew();
  absl::Status SetStepInBackward();
  absl::Status Step(int step);
  absl::Status StartStyle(int step);
  absl::Status LoseBackward(int step);
  absl::Status FailOnPurpose(int step, ProgramFailure failure);
  absl::Status MicroBatches(int step);
  absl::Status ForwardMicro(const ProgramPlace& place, Micro* micro);
  absl::Status BackwardMicro(const ProgramPlace& place, const Micro& micro);
  std::optional<NoSyncScope> Keep(int n);
  absl::Status BackwardAll(int step, std::vector<Micro>& waiting);
  absl::Status CompareInputs(int step, const std::vector<Micro>& micros);
  absl::Status Optimize(int step);
  absl::Status UnscaleAndClip(int step);
  absl::Status HalveGradients();
  absl::Status OptimizeAndHold(int step);
  absl::Status Compare(int step);
  void Zero();

  // --- Calls between them --------------------------------------------------
  absl::Status Call(int step, int call);
  absl::Status Look();
  absl::Status UnshardAll();
  absl::Status Rebuild();
  absl::Status Eval(int step);
  absl::Status Measure(int step);
  absl::Status LoseForward(int step);
  absl::Status SaveAndCompare();
  absl::Status Summon(bool write);
  absl::Status Visit();
  absl::Status LoadOtherValues();
  absl::Status TakeSnapshot();
  absl::Status Restore();
  absl::Status RestoreModel();
  absl::Status RemakeOptimizer();
  absl::Status Toggle(int step);
  void WriteShards();
  std::string SaveModel();
  absl::Status CompareOutput(const at::Tensor& output);

  // The modules that Unshard() takes.
  std::vector<torch::nn::Module*> UnitModules() const;
  absl::Status Differ(absl::string_view what, const at::Tensor& got,
                      const at::Tensor& expected) const;
  // Lets ranks drift apart: yields at moments that the program's salt decides,
  // on the late rank far more often.
  void MaybeDelay();

  const Program p_;
  const ProgramRecord& record_;
  comm::Communicator& world_;
  const std::string directory_;
  const double tolerance_;
  // The largest loss, at least 1. Tolerances are relative to it: in a model
  // that diverges, gradients that should be zero are roundings of large
  // numbers.
  double scale_ = 1;
  SeededChoices delays_;
  std::optional<comm::Mesh> mesh_;
  FullyShardedDataParallel<ProgramModel> model_{nullptr};
  ProgramOptimizers optimizers_;
  std::shared_ptr<ActivationOffload> activations_;
  std::optional<ShardedGradScaler> scaler_;
  Snapshot snapshot_;
  size_t next_output_ = 0;
  size_t next_saved_ = 0;
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_SHARDED_RUN_H_
