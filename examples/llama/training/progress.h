// Reports how a run goes: lines for people, and lines of JSON.
#ifndef EXAMPLES_LLAMA_TRAINING_PROGRESS_H_
#define EXAMPLES_LLAMA_TRAINING_PROGRESS_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <fstream>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/json.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/trainer.h"

namespace llama {

struct ProgressOptions {
  int64_t steps = 1;  // of the run
  int64_t every = 1;  // steps between two lines
  double flops_per_token = 0;
  // Where the model is. If its allocator counts, as a GPU's does, metrics have
  // the most that tensors took and that it held so far, in MiB.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // A file to which lines of JSON are appended; empty: none. When a run goes
  // on, it writes {"goes_on_after": step}: earlier lines of later steps are
  // void.
  std::string metrics;
};

// Used by rank 0. Thread-compatible.
class Progress {
 public:
  // `out` outlives it.
  Progress(const ProgressOptions& options, std::ostream* out);

  // Opens options.metrics. InvalidArgument: it cannot be opened. Comes first.
  absl::Status Open();
  // Says that the run goes on from the checkpoint of `step`.
  void GoesOn(int64_t step);
  // Says that the first step of this process begins at `now`.
  void Begin(absl::Time now);
  // Says that `step`, from 1, has ended.
  void Step(int64_t step, const StepResult& result, absl::Time now);
  void Evaluated(int64_t step, double loss);
  // ResourceExhausted: options.metrics could not be written completely.
  absl::Status Finish();

 private:
  void WriteMetrics(fsdp::Json::Object line);

  const ProgressOptions options_;
  std::ostream& out_;
  std::ofstream metrics_;
  // Rates leave out the first step, which allocates.
  absl::Time first_end_ = absl::InfinitePast();
  absl::Time begin_ = absl::InfinitePast();
  int64_t first_step_ = 0;
  absl::Time last_end_ = absl::InfinitePast();
};

// Returns "3:09" or "2:00:09".
std::string Clock(absl::Duration duration);

// Returns the floating-point operations of forward and backward for one token
// of a row of `seq`, as Chowdhery et al. 2022 (PaLM, appendix B) count them: 6
// per weight of the layers and the head, and 12 per layer, head, channel and
// token that attention looks at, without counting recomputation and what a
// causal mask spares. With a frozen base it is 4 per weight, as its gradients
// are not computed.
double FlopsPerToken(const LlamaConfig& config, int64_t seq, bool frozen_base);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_PROGRESS_H_
