// A small model and its data, equal on all ranks and without random numbers,
// which rank-threads would share.
#ifndef FSDP_TESTING_TOY_MODEL_H_
#define FSDP_TESTING_TOY_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/options/options.h"

namespace fsdp::testing {

// Computes x + out(tanh(fc(x))).
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int64_t dim);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc;
  torch::nn::Linear out;
};

// Computes head(blocks(embed(x))) and calls its blocks by fsdp::Forward.
class NetImpl : public torch::nn::Module {
 public:
  NetImpl(int64_t dim, int num_blocks);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear embed;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};

// Overwrites the parameters of `module` with values that depend on their order
// and on `seed` only.
void FillParameters(torch::nn::Module& module, int seed);

template <typename Net>
std::shared_ptr<Net> Filled() {
  auto net = std::make_shared<Net>();
  FillParameters(*net, 1);
  return net;
}

std::shared_ptr<NetImpl> MakeNet(int64_t dim, int num_blocks, int seed = 0);

// Returns rows [begin, begin + rows) of an endless fixed data set of `dim`
// columns.
at::Tensor Rows(int64_t begin, int64_t rows, int64_t dim);

// Returns the mean squared distance of the net's output from tanh of its input.
at::Tensor Loss(const at::Tensor& output, const at::Tensor& input);

template <typename... Units>
Options UnitsOf() {
  Options options;
  options.wrap_policy = WrapModules<Units...>();
  return options;
}

Options BlockUnits();

// Returns a pointer to a communicator that the caller owns.
std::shared_ptr<comm::Communicator> Unowned(comm::Communicator& communicator);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TOY_MODEL_H_
