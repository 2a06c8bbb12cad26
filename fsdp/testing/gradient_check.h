// Compares the gradients of a sharded module with those of a plain one.
#ifndef FSDP_TESTING_GRADIENT_CHECK_H_
#define FSDP_TESTING_GRADIENT_CHECK_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gtest/gtest.h"

namespace fsdp::testing {

inline constexpr int64_t kDim = 5;
using Gradients = std::map<std::string, at::Tensor>;

// Gradients by parameter name, this rank's range in place and zero elsewhere;
// undefined ones are left out.
inline Gradients ShardGradients(const ShardedModuleBase& model) {
  Gradients result;
  for (const NamedShard& named : model.NamedShards()) {
    if (!named.shard.grad().defined()) continue;
    int64_t numel = 1;
    for (int64_t size : named.sizes) numel *= size;
    at::Tensor full = at::zeros({numel});
    full.narrow(0, named.begin, named.shard.numel()).copy_(named.shard.grad());
    result[named.name] = full;
  }
  return result;
}

// `net` makes a module, `loss` runs it. Gradients on two ranks, which see the
// same data, equal those of a plain module, and the same names have one.
template <typename Net>
absl::Status CheckGradients(
    comm::Communicator& communicator, const Options& options,
    const std::function<std::shared_ptr<Net>()>& make_net,
    const std::function<at::Tensor(std::function<at::Tensor(at::Tensor)>)>&
        loss) {
  std::shared_ptr<Net> plain = make_net();
  loss([&](at::Tensor x) -> at::Tensor {
    return plain->forward(x);
  }).backward();
  FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<Net> model,
                        FullyShard(make_net(), Unowned(communicator), options));
  FSDP_RETURN_IF_ERROR(
      model->Backward(loss([&](at::Tensor x) { return model->forward(x); })));
  Gradients actual = ShardGradients(*model);
  for (const auto& item : plain->named_parameters()) {
    const at::Tensor expected = item.value().grad();
    const auto found = actual.find(item.key());
    if (expected.defined() != (found != actual.end())) {
      return absl::InternalError(absl::StrCat(
          item.key(), expected.defined() ? " has no" : " has a", " gradient"));
    }
    if (!expected.defined()) continue;
    at::Tensor sum = found->second;
    FSDP_ASSIGN_OR_RETURN(
        auto work, communicator.AllReduce(sum, comm::ReduceOp::kSum, "test"));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::InfiniteFuture()));
    // The storage order of all parameters compared here is row-major unless
    // they are transposed, as ranges of a shard are in storage order.
    const at::Tensor dense = item.value().is_contiguous()
                                 ? expected.reshape({-1})
                                 : expected.t().reshape({-1});
    if (!at::allclose(sum, dense, 1e-4, 1e-6)) {
      return absl::InternalError(absl::StrCat("gradient of ", item.key()));
    }
  }
  if (model->memory_stats().parameters.in_use_bytes != 0) {
    return absl::InternalError("unsharded memory is left");
  }
  return absl::OkStatus();
}

template <typename Net>
void ExpectSameGradients(
    const std::function<std::shared_ptr<Net>()>& make_net,
    const std::function<at::Tensor(std::function<at::Tensor(at::Tensor)>)>&
        loss,
    const Options& options) {
  EXPECT_OK(
      comm::testing::RunAllRanks(2, [&](comm::Communicator& communicator) {
        return CheckGradients<Net>(communicator, options, make_net, loss);
      }));
}

template <typename Net>
std::shared_ptr<Net> Filled() {
  auto net = std::make_shared<Net>();
  FillParameters(*net, 1);
  return net;
}

inline at::Tensor SquareLoss(
    const std::function<at::Tensor(at::Tensor)>& forward) {
  return forward(Rows(0, 3, kDim)).square().mean();
}

// A linear layer as a unit of its own.
class UnitImpl : public torch::nn::Module {
 public:
  UnitImpl()
      : linear(register_module("linear", torch::nn::Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear;
};

template <typename... Units>
Options UnitsOf() {
  Options options;
  options.wrap_policy = WrapModules<Units...>();
  return options;
}

class UsedTwice : public torch::nn::Module {
 public:
  UsedTwice()
      : unit(register_module("unit", std::make_shared<UnitImpl>())),
        head(register_module("head", torch::nn::Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(Forward(unit, Forward(unit, x).tanh()));
  }
  std::shared_ptr<UnitImpl> unit;
  torch::nn::Linear head;
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_GRADIENT_CHECK_H_
