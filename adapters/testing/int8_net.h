// The net of adapted_net.h with an int8 base, and one of plain numbers that
// computes the same.
#ifndef ADAPTERS_TESTING_INT8_NET_H_
#define ADAPTERS_TESTING_INT8_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adapters/lora_config.h"
#include "adapters/quantized_base.h"
#include "adapters/testing/adapted_net.h"
#include "comm/mesh.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"

namespace fsdp::adapters::testing {

using Values = std::map<std::string, at::Tensor>;
using Model = FullyShardedDataParallel<NetImpl>;

// Blocks that do not divide the rows: the last is shorter.
Int8Options OddBlocks();

// On all layers, of rank 3.
LoraConfig OnAllLayers();

// MakeNet(seed) with an int8 base of OddBlocks() and factors that have learned.
absl::StatusOr<std::shared_ptr<NetImpl>> MakeInt8Net(uint64_t seed);

// The same net of numbers: those that the int8 weights stand for.
absl::StatusOr<std::shared_ptr<NetImpl>> WithNumbers(const NetImpl& int8);

// Copies of all parameters.
Values ValuesOf(const torch::nn::Module& module);
absl::StatusOr<Values> ValuesOf(Model& model);

// MakeInt8Net(seed), sharded.
absl::StatusOr<Model> ShardInt8Net(uint64_t seed, const comm::Mesh& mesh,
                                   const Options& options = BlockUnits());

// Some steps of AdamW on data of their own, each rank with its rows, and by one
// process with all of them: the loss of each.
absl::StatusOr<std::vector<double>> Train(Model& model);
std::vector<double> TrainPlain(NetImpl& net);

}  // namespace fsdp::adapters::testing

#endif  // ADAPTERS_TESTING_INT8_NET_H_
