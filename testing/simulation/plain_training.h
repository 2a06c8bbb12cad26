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

#include "fsdp/testing/toy_model.h"
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

  float Loss(int64_t step, int backward, int rank);
  const Values& ValuesAfter(int64_t steps);

 private:
  using Tensors = std::vector<at::Tensor>;

  void NoteValues();
  // Returns the losses, by backward and rank.
  std::vector<std::vector<float>> Step(int step);
  Tensors Backward(int step, int backward, int rank, int world_size,
                   float* loss_value);
  Tensors Mean(const std::vector<Tensors>& by_rank) const;

  const Training t_;
  const NetworkOptions network_;
  const std::vector<int> world_sizes_;
  const std::shared_ptr<fsdp::testing::NetImpl> net_;     // computes
  const std::shared_ptr<fsdp::testing::NetImpl> master_;  // is trained
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<std::vector<std::vector<float>>> losses_;
  std::vector<Values> values_;  // by number of steps
};

// Returns the first value that differs in any bit, "" if none does.
std::string FirstDifference(const Values& actual, const Values& expected);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_PLAIN_TRAINING_H_
