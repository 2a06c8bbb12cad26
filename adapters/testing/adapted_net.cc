#include "adapters/testing/adapted_net.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/model/forward.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::adapters::testing {
namespace {

constexpr int64_t kWide = 24;
constexpr int kLayers = 2;
constexpr int kSteps = 4;
constexpr int64_t kRows = 30;  // of all ranks, 1, 2, 3 or 5

}  // namespace

BlockImpl::BlockImpl()
    : q_proj(register_module(
          "q_proj", Linear(torch::nn::LinearOptions(kDim, kWide).bias(false)))),
      v_proj(register_module("v_proj", Linear(kDim, kWide))),
      o_proj(register_module("o_proj", Linear(kWide, kDim))) {}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  return x + o_proj(at::tanh(q_proj(x)) * v_proj(x));
}

NetImpl::NetImpl()
    : layers(register_module("layers", torch::nn::ModuleList())),
      head(register_module("head", Linear(kDim, kClasses))) {
  for (int i = 0; i < kLayers; ++i) {
    layers->push_back(std::make_shared<BlockImpl>());
  }
}

at::Tensor NetImpl::forward(const at::Tensor& x) {
  at::Tensor y = x;
  for (const auto& layer : *layers) {
    y = Forward(*layer->as<BlockImpl>(), y);
  }
  return head(y);
}

std::shared_ptr<NetImpl> MakeNet(uint64_t seed) {
  auto net = std::make_shared<NetImpl>();
  const c10::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const at::Tensor& parameter : net->parameters()) {
    at::Tensor(parameter).normal_(0, 0.3, generator);
  }
  return net;
}

Options BlockUnits() {
  Options options;
  options.wrap_policy = WrapModules<BlockImpl>();
  return options;
}

namespace {

struct Batch {
  at::Tensor x;
  at::Tensor y;
};

Batch BatchOf(int step) {
  at::Generator generator = at::detail::createCPUGenerator(100 + step);
  return {
      at::randn({kRows, kDim}, generator),
      at::randint(kClasses, {kRows}, generator, at::TensorOptions(at::kLong))};
}

torch::optim::AdamWOptions AdamW() {
  return torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
}

std::vector<at::Tensor> Trained(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  return trained;
}

}  // namespace

Int8Options OddBlocks() {
  Int8Options options;
  options.block = 7;
  return options;
}

LoraConfig OnAllLayers() {
  LoraConfig config;
  config.rank = 3;
  config.alpha = 6;
  config.targets = {kAllLinear};
  return config;
}

absl::StatusOr<std::shared_ptr<NetImpl>> MakeInt8Net(uint64_t seed) {
  auto net = MakeNet(seed);
  FSDP_RETURN_IF_ERROR(QuantizeBase(*net, OddBlocks()));
  FSDP_RETURN_IF_ERROR(AddLora(*net, OnAllLayers()));
  const c10::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const auto& item : net->named_parameters()) {
    if (IsFactor(item.key())) item.value().normal_(0, 0.3, generator);
  }
  return net;
}

absl::StatusOr<std::shared_ptr<NetImpl>> WithNumbers(const NetImpl& int8) {
  auto net = std::make_shared<NetImpl>();
  FSDP_RETURN_IF_ERROR(AddLora(*net, OnAllLayers()));
  const c10::NoGradGuard no_grad;
  const auto values = int8.named_parameters();
  for (const auto& item : net->named_parameters()) {
    const at::Tensor& value = values[item.key()];
    if (value.is_floating_point()) item.value().copy_(value);
  }
  const auto modules = int8.named_modules();
  for (const auto& item : net->named_modules()) {
    if (auto* const layer = item.value()->as<LinearImpl>()) {
      layer->weight.copy_(
          modules[item.key()]->as<LinearImpl>()->WeightIn(at::kFloat));
    }
  }
  return net;
}

Values ValuesOf(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach().clone();
  }
  return values;
}

absl::StatusOr<Values> ValuesOf(Model& model) {
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
  Values values;
  for (const auto& item : dict) values[item.key()] = item.value();
  return values;
}

absl::StatusOr<std::vector<double>> Train(Model& model) {
  comm::Communicator& world = model->communicator();
  FusedAdamW optimizer(Trained(model->Parameters()), AdamW());
  const int64_t rows = kRows / world.world_size();
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = BatchOf(step);
    const auto mine = [&](const at::Tensor& all) {
      return all.narrow(0, rows * world.rank(), rows);
    };
    const at::Tensor loss =
        at::cross_entropy_loss(model->forward(mine(batch.x)), mine(batch.y));
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    optimizer.step();
    optimizer.zero_grad();
    FSDP_ASSIGN_OR_RETURN(losses.emplace_back(),
                          comm::Mean(world, loss.item<double>()));
  }
  return losses;
}

std::vector<double> TrainPlain(NetImpl& net) {
  torch::optim::AdamW optimizer(Trained(net.parameters()), AdamW());
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = BatchOf(step);
    const at::Tensor loss =
        at::cross_entropy_loss(net.forward(batch.x), batch.y);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace fsdp::adapters::testing
