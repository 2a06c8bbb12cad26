#include "fsdp/testing/program/program_optimizers.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <iterator>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::testing {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

constexpr double kRate = 0.02;

// Returns the same value in every process, unlike std::hash.
uint32_t HashOf(absl::string_view text, int salt) {
  uint32_t hash = 2166136261u + static_cast<uint32_t>(salt);
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  }
  return hash >> 8;
}

// Returns the tensors by optimizer, then by group.
std::vector<std::vector<std::vector<at::Tensor>>> Distribute(
    const Program& p, const NamedTensors& tensors) {
  const int optimizers = p.two_optimizers ? 2 : 1;
  std::vector<std::vector<std::vector<at::Tensor>>> all(
      optimizers, std::vector<std::vector<at::Tensor>>(p.groups));
  for (const auto& [name, tensor] : tensors) {
    const uint32_t hash = HashOf(name, p.salt);
    if (p.omits && hash % 7 == 0) continue;
    auto& group = all[hash % optimizers][hash / 2 % p.groups];
    // The order must not be that of the model.
    group.insert(hash % 5 == 0 ? group.begin() : group.end(), tensor);
  }
  return all;
}

template <typename Options>
Groups MakeGroups(const Program& p, int optimizer, const Options& options,
                  const std::vector<std::vector<at::Tensor>>& tensors) {
  Groups groups;
  for (int i = 0; i < p.groups; ++i) {
    auto own = std::make_unique<Options>(options);
    own->lr(kRate * (1 + i) / (1 + optimizer));
    if (p.weight_decay) own->weight_decay(0.05 * (p.groups == 1 ? 1 : i));
    groups.emplace_back(tensors[i], std::move(own));
  }
  return groups;
}

template <typename Plain, typename Options>
void AddPlain(const Groups& groups, const Options& options,
              ProgramOptimizers* all) {
  auto optimizer = std::make_unique<Plain>(groups, options);
  all->unit_steps.push_back(
      [raw = optimizer.get()](absl::Span<const TensorRange>) {
        raw->step();
        return absl::OkStatus();
      });
  all->all.push_back(std::move(optimizer));
}

template <typename Plain, typename Fused, typename Options>
void AddEither(bool fused, const Groups& groups, const Options& options,
               ProgramOptimizers* all) {
  if (!fused) return AddPlain<Plain>(groups, options, all);
  auto optimizer = std::make_unique<Fused>(groups, options);
  all->unit_steps.push_back(
      [raw = optimizer.get()](absl::Span<const TensorRange> unit) {
        return raw->StepUnit(unit);
      });
  all->all.push_back(std::move(optimizer));
}

// States are compared, so small denominators must not magnify rounding.
constexpr double kEpsilon = 1e-3;

void AddOptimizer(const Program& p, bool fused, int index,
                  const std::vector<std::vector<at::Tensor>>& tensors,
                  ProgramOptimizers* all) {
  const double momentum = p.momentum ? 0.9 : 0;
  const auto groups = [&](const auto& options) {
    return MakeGroups(p, index, options, tensors);
  };
  if (p.optimizer == kSgd) {
    const auto options =
        torch::optim::SGDOptions(kRate).momentum(momentum).nesterov(
            p.nesterov != 0);
    AddEither<torch::optim::SGD, FusedSGD>(fused, groups(options), options,
                                           all);
  } else if (p.optimizer == kAdamW) {
    const auto options =
        torch::optim::AdamWOptions(kRate).amsgrad(p.amsgrad != 0).eps(kEpsilon);
    AddEither<torch::optim::AdamW, FusedAdamW>(fused, groups(options), options,
                                               all);
  } else if (p.optimizer == kAdam) {
    const auto options =
        torch::optim::AdamOptions(kRate).amsgrad(p.amsgrad != 0).eps(kEpsilon);
    AddEither<torch::optim::Adam, FusedAdam>(fused, groups(options), options,
                                             all);
  } else if (p.optimizer == kAdagrad) {
    const auto options = torch::optim::AdagradOptions(kRate).eps(kEpsilon);
    AddPlain<torch::optim::Adagrad>(groups(options), options, all);
  } else {
    const auto options = torch::optim::RMSpropOptions(kRate)
                             .eps(10 * kEpsilon)
                             .momentum(momentum)
                             .centered(p.nesterov != 0);
    AddPlain<torch::optim::RMSprop>(groups(options), options, all);
  }
}

}  // namespace

void ProgramOptimizers::ZeroGrad(bool set_to_none) {
  for (const auto& optimizer : all) optimizer->zero_grad(set_to_none);
}

void ProgramOptimizers::Step() {
  for (const auto& optimizer : all) optimizer->step();
}

ProgramOptimizers MakeOptimizers(const Program& program, bool sharded,
                                 const NamedTensors& tensors) {
  ProgramOptimizers optimizers;
  const auto distributed = Distribute(program, tensors);
  for (size_t i = 0; i < distributed.size(); ++i) {
    AddOptimizer(program, sharded && program.fused, static_cast<int>(i),
                 distributed[i], &optimizers);
  }
  return optimizers;
}

void SetRates(int step, ProgramOptimizers& optimizers) {
  for (const auto& optimizer : optimizers.all) {
    for (auto& group : optimizer->param_groups()) {
      group.options().set_lr(0.01 + 0.01 * (step % 3));
    }
  }
}

std::map<std::string, at::Tensor> StateTensors(
    const torch::optim::OptimizerParamState& state) {
  std::map<std::string, at::Tensor> tensors;
  const auto adam = [&tensors](const auto& s) {
    tensors = {{"exp_avg", s.exp_avg()},
               {"exp_avg_sq", s.exp_avg_sq()},
               {"max_exp_avg_sq", s.max_exp_avg_sq()}};
  };
  if (const auto* sgd =
          dynamic_cast<const torch::optim::SGDParamState*>(&state)) {
    tensors = {{"momentum_buffer", sgd->momentum_buffer()}};
  } else if (const auto* w =
                 dynamic_cast<const torch::optim::AdamWParamState*>(&state)) {
    adam(*w);
  } else if (const auto* a =
                 dynamic_cast<const torch::optim::AdamParamState*>(&state)) {
    adam(*a);
  } else if (const auto* g =
                 dynamic_cast<const torch::optim::AdagradParamState*>(&state)) {
    tensors = {{"sum", g->sum()}};
  } else if (const auto* r =
                 dynamic_cast<const torch::optim::RMSpropParamState*>(&state)) {
    tensors = {{"square_avg", r->square_avg()},
               {"momentum_buffer", r->momentum_buffer()},
               {"grad_avg", r->grad_avg()}};
  }
  for (auto it = tensors.begin(); it != tensors.end();) {
    it = it->second.defined() ? std::next(it) : tensors.erase(it);
  }
  return tensors;
}

}  // namespace fsdp::testing
