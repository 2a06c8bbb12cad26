// What a simulated training has to give: the naive way, by plain LibTorch,
// without shards, ranks and time.
#ifndef TESTING_SIMULATION_PLAIN_TRAINING_H_
#define TESTING_SIMULATION_PLAIN_TRAINING_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "testing/simulation/network.h"
#include "testing/simulation/scenario.h"

namespace fsdp::simulation {

using Values = std::map<std::string, at::Tensor>;  // by name

struct PlainRecord {
  // By step, backward and rank.
  std::vector<std::vector<std::vector<float>>> losses;
  std::vector<Values> values;  // after so many steps
};

// The rows of one backward of one rank.
at::Tensor DataOf(const Training& training, int step, int backward, int rank,
                  int world_size);

// Each step's gradient is what the ranks compute one after the other, in the
// dtype that they compute in, added in the order that the contract of
// comm::Communicator has: float32, rank after rank; of a mesh first each row.
// `world_sizes`: how many ranks each step has.
PlainRecord TrainPlain(const Training& training, const NetworkOptions& network,
                       const std::vector<int>& world_sizes);

// Empty, or the first value that differs in any bit.
std::string FirstDifference(const Values& actual, const Values& expected);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_PLAIN_TRAINING_H_
