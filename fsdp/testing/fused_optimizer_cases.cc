#include "fsdp/testing/fused_optimizer_cases.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <sstream>
#include <utility>

#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::testing {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

const std::vector<int64_t>& Sizes() {
  static const auto* const sizes = new std::vector<int64_t>{
      0, 1, 2, 3, 5, 7, 0, 16, 64, 1, 1, 1, 13, 1009, 100, 31, 0};
  return *sizes;
}

at::Tensor Random(int64_t numel, int seed, at::ScalarType dtype) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({numel}, generator, at::kFloat).to(dtype);
}

Shards::Shards(std::vector<int64_t> sizes, at::ScalarType dtype)
    : sizes_(std::move(sizes)) {
  int64_t numel = 0;
  for (int64_t size : sizes_) numel += size;
  values = Random(numel, 1, dtype);
  Cut();
}

Shards Shards::Apart(at::ScalarType dtype) const {
  Shards apart = *this;
  apart.leaves.clear();
  for (const at::Tensor& leaf : leaves) {
    apart.leaves.push_back(leaf.detach().clone().to(dtype).requires_grad_());
  }
  apart.apart_ = true;
  return apart;
}

void Shards::SetGradients(int step, const std::function<bool(size_t)>& has,
                          at::ScalarType dtype) {
  const at::Tensor all = Random(values.numel(), 100 + step, dtype);
  int64_t begin = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    at::Tensor gradient = all.narrow(0, begin, sizes_[i]);
    begin += sizes_[i];
    if (apart_) gradient = gradient.clone();
    leaves[i].mutable_grad() =
        has == nullptr || has(i) ? gradient.detach() : at::Tensor();
  }
}

at::Tensor Shards::All() const { return at::cat(leaves).detach(); }

void Shards::Cut() {
  int64_t begin = 0;
  for (int64_t size : sizes_) {
    leaves.push_back(values.narrow(0, begin, size).detach().requires_grad_());
    begin += size;
  }
}

namespace {

template <typename Fused, typename Plain, typename Options>
Kind KindOf(std::string name, const Options& options) {
  Kind kind;
  kind.name = std::move(name);
  kind.options = [options] { return std::make_unique<Options>(options); };
  kind.make_plain = [options](const std::vector<OptimizerParamGroup>& groups) {
    return std::make_unique<Plain>(groups, options);
  };
  kind.make_fused = [options](const std::vector<OptimizerParamGroup>& groups) {
    return std::make_unique<Fused>(groups, options);
  };
  return kind;
}

Kind AdamWKind(std::string name, const AdamWOptions& options) {
  return KindOf<FusedAdamW, torch::optim::AdamW>(std::move(name), options);
}
Kind AdamKind(std::string name, const AdamOptions& options) {
  return KindOf<FusedAdam, torch::optim::Adam>(std::move(name), options);
}
Kind SgdKind(std::string name, const SGDOptions& options) {
  return KindOf<FusedSGD, torch::optim::SGD>(std::move(name), options);
}

}  // namespace

std::vector<Kind> Kinds() {
  return {
      AdamWKind("AdamW", AdamWOptions(1e-2)),
      AdamWKind("AdamWAmsgrad",
                AdamWOptions(1e-2).amsgrad(true).weight_decay(0).eps(1e-6)),
      AdamKind("Adam", AdamOptions(1e-2)),
      AdamKind("AdamDecayAmsgrad",
               AdamOptions(1e-2).weight_decay(0.1).amsgrad(true)),
      SgdKind("SGD", SGDOptions(0.1)),
      SgdKind("SGDMomentum",
              SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.01)),
      SgdKind("SGDNesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
  };
}

std::unique_ptr<Optimizer> Of(const std::function<std::unique_ptr<Optimizer>(
                                  std::vector<OptimizerParamGroup>)>& make,
                              const std::vector<at::Tensor>& leaves) {
  return make({OptimizerParamGroup(leaves)});
}

std::function<bool(size_t)> SomeAt(int step) {
  return [step](size_t i) { return i % 5 != 0 || (step > 3 && step % 2 == 0); };
}

std::string Saved(const Optimizer& optimizer) {
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(out);
  return out.str();
}

void Load(const std::string& bytes, Optimizer& optimizer) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  optimizer.load(archive);
}

FusedOptimizerTest::FusedOptimizerTest() { at::set_num_threads(1); }

}  // namespace fsdp::testing
