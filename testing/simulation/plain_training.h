// What a simulated training has to give: the naive way, by plain LibTorch,
// without shards, ranks and time.
#ifndef TESTING_SIMULATION_PLAIN_TRAINING_H_
#define TESTING_SIMULATION_PLAIN_TRAINING_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "testing/simulation/network.h"
#include "testing/simulation/scenario.h"

namespace fsdp::simulation {

using Values = std::map<std::string, at::Tensor>;  // by name

// The rows of one backward of one rank.
at::Tensor DataOf(const Training& training, int step, int backward, int rank,
                  int world_size);

// A training, as far as somebody has asked for what it gives. Each step's
// gradient is what the ranks compute one after the other, in the dtype that
// they compute in, added in the order that the contract of comm::Communicator
// has: float32, rank after rank; of a mesh first each row.
class PlainTraining {
 public:
  // `world_sizes`: how many ranks each step has.
  PlainTraining(const Training& training, const NetworkOptions& network,
                std::vector<int> world_sizes);
  PlainTraining(const PlainTraining&) = delete;
  PlainTraining& operator=(const PlainTraining&) = delete;
  ~PlainTraining();

  float Loss(int64_t step, int backward, int rank);
  // After so many steps.
  const Values& ValuesAfter(int64_t steps);

 private:
  class Run;

  const std::vector<int> world_sizes_;
  const std::unique_ptr<Run> run_;
  // By step, backward and rank.
  std::vector<std::vector<std::vector<float>>> losses_;
  std::vector<Values> values_;  // after so many steps
};

// Empty, or the first value that differs in any bit.
std::string FirstDifference(const Values& actual, const Values& expected);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_PLAIN_TRAINING_H_
