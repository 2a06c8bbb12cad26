// The model of record_peft.py, of layers that can have adapters.
#ifndef ADAPTERS_TESTING_ADAPTED_NET_H_
#define ADAPTERS_TESTING_ADAPTED_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "adapters/linear.h"
#include "adapters/lora.h"
#include "base/testing/status_matchers.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"

namespace fsdp::adapters::testing {

inline constexpr int64_t kDim = 16;
inline constexpr int64_t kClasses = 5;

// x + o_proj(tanh(q_proj(x)) * v_proj(x)).
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl();
  at::Tensor forward(const at::Tensor& x);

  Linear q_proj, v_proj, o_proj;
};

// head(layers(x)): [rows, kDim] -> [rows, kClasses].
class NetImpl : public torch::nn::Module {
 public:
  NetImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::ModuleList layers;
  Linear head;
};

// With values that `seed` alone decides.
std::shared_ptr<NetImpl> MakeNet(uint64_t seed);

// Every BlockImpl a unit.
Options BlockUnits();

// The net with an int8 base, and one of plain numbers that computes the same.

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

// Match an error of that code whose text has `part`.
inline auto Invalid(const std::string& part) {
  return ::fsdp::testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                   ::testing::HasSubstr(part));
}
inline auto Refused(const std::string& part) {
  return ::fsdp::testing::StatusIs(absl::StatusCode::kFailedPrecondition,
                                   ::testing::HasSubstr(part));
}

// Some steps of AdamW on data of their own, each rank with its rows, and by one
// process with all of them: the loss of each.
absl::StatusOr<std::vector<double>> Train(Model& model);
std::vector<double> TrainPlain(NetImpl& net);

}  // namespace fsdp::adapters::testing

#endif  // ADAPTERS_TESTING_ADAPTED_NET_H_
