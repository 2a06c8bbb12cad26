// Measures what a simulated step needs to know about this machine.
#ifndef BENCHMARKS_STEP_CALIBRATION_H_
#define BENCHMARKS_STEP_CALIBRATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "benchmarks/sharded_mlp.h"
#include "comm/communicator.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp {

using Group = std::vector<std::shared_ptr<comm::Communicator>>;

// Seconds on one rank, by unit: the root, with head and loss, then the blocks.
struct PlainSeconds {
  std::vector<double> forward;
  std::vector<double> backward;
  double optimizer = 0;

  double compute() const;
};

// Runs steps of unsharded models that share nothing, one per thread, all at the
// same time.
class PlainModels {
 public:
  PlainModels(int threads, int64_t rows);

  // Returns the seconds of the second of two steps, the mean over the threads.
  PlainSeconds Measure();

 private:
  struct Model {
    std::shared_ptr<ResidualMlpImpl> net;
    std::shared_ptr<FusedAdamW> optimizer;
    at::Tensor x;
  };
  static PlainSeconds Step(const Model& model);

  std::vector<Model> models_;
};

// Returns the bytes that a thread reads and writes per second while `threads`
// copy buffers of the size of the model's units.
double CopyBandwidth(int threads);

struct CollectiveSeconds {
  double latency = 0;  // with a few bytes
  double all_gather = 0;
  double reduce_scatter = 0;
};

// Returns the mean seconds of collectives in place on buffers of `bytes` in
// all.
CollectiveSeconds MeasureCollectives(const Group& group, int64_t bytes);

}  // namespace fsdp

#endif  // BENCHMARKS_STEP_CALIBRATION_H_
