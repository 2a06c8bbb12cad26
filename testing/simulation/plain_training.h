// Computes what a simulated training has to give in the naive way: by plain
// LibTorch, without shards, ranks and time.
#ifndef TESTING_SIMULATION_PLAIN_TRAINING_H_
#define TESTING_SIMULATION_PLAIN_TRAINING_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "testing/simulation/network.h"
#include "testing/simulation/scenario.h"

namespace fsdp::simulation {

// Makes the optimizer of a training, over shards or whole parameters.
std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const Training& training, std::vector<at::Tensor> parameters);

using Values = std::map<std::string, at::Tensor>;  // by name

// Returns the rows of one backward of one rank.
at::Tensor DataOf(const Training& training, int step, int backward, int rank,
                  int world_size);

// Is a training, as far as its results have been asked for. A step's gradients
// are computed rank after rank, in the dtype that the ranks compute in, and
// added in the order of comm::Communicator's contract: in float32, rank after
// rank; in a mesh first each row.
class PlainTraining {
 public:
  // `world_sizes` says how many ranks each step has.
  PlainTraining(const Training& training, const NetworkOptions& network,
                std::vector<int> world_sizes);
  PlainTraining(const PlainTraining&) = delete;
  PlainTraining& operator=(const PlainTraining&) = delete;
  ~PlainTraining();

  float Loss(int64_t step, int backward, int rank);
  const Values& ValuesAfter(int64_t steps);

 private:
  class Run;

  const std::vector<int> world_sizes_;
  const std::unique_ptr<Run> run_;
  std::vector<std::vector<std::vector<float>>> losses_;
  std::vector<Values> values_;  // by number of steps
};

// Returns the first value that differs in any bit, "" if none does.
std::string FirstDifference(const Values& actual, const Values& expected);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_PLAIN_TRAINING_H_
