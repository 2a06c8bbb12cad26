#include "fsdp/state/optimizer_slots.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

using torch::optim::OptimizerParamState;

// Calls tensor(name, reference) and number(name, reference) for what a class of
// states has.
template <typename State, typename Visitor>
void VisitAdam(State& state, Visitor& visitor) {
  visitor.Number("step", state.step());
  visitor.Tensor("exp_avg", state.exp_avg());
  visitor.Tensor("exp_avg_sq", state.exp_avg_sq());
  visitor.Tensor("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <typename Visitor>
void Visit(torch::optim::AdamParamState& state, Visitor& visitor) {
  VisitAdam(state, visitor);
}
template <typename Visitor>
void Visit(torch::optim::AdamWParamState& state, Visitor& visitor) {
  VisitAdam(state, visitor);
}
template <typename Visitor>
void Visit(torch::optim::SGDParamState& state, Visitor& visitor) {
  visitor.Tensor("momentum_buffer", state.momentum_buffer());
}
template <typename Visitor>
void Visit(torch::optim::AdagradParamState& state, Visitor& visitor) {
  visitor.Number("step", state.step());
  visitor.Tensor("sum", state.sum());
}
template <typename Visitor>
void Visit(torch::optim::RMSpropParamState& state, Visitor& visitor) {
  visitor.Number("step", state.step());
  visitor.Tensor("square_avg", state.square_avg());
  visitor.Tensor("momentum_buffer", state.momentum_buffer());
  visitor.Tensor("grad_avg", state.grad_avg());
}

struct Reader {
  void Tensor(const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) slots.tensors[name] = tensor;
  }
  void Number(const char* name, int64_t number) {
    slots.numbers[name] = number;
  }

  OptimizerSlots slots;
};

struct Writer {
  void Tensor(const char* name, at::Tensor& tensor) {
    const auto found = slots.tensors.find(name);
    if (found == slots.tensors.end()) return;
    tensor = found->second;
    slots.tensors.erase(found);
  }
  void Number(const char* name, int64_t& number) {
    const auto found = slots.numbers.find(name);
    if (found == slots.numbers.end()) return;
    number = found->second;
    slots.numbers.erase(found);
  }

  OptimizerSlots slots;  // what has found no place yet
};

template <typename State, typename Visitor>
bool VisitAs(OptimizerParamState& state, Visitor& visitor) {
  auto* derived = dynamic_cast<State*>(&state);
  if (derived == nullptr) return false;
  Visit(*derived, visitor);
  return true;
}

template <typename Visitor>
bool VisitAny(OptimizerParamState& state, Visitor& visitor) {
  return VisitAs<torch::optim::AdamWParamState>(state, visitor) ||
         VisitAs<torch::optim::AdamParamState>(state, visitor) ||
         VisitAs<torch::optim::SGDParamState>(state, visitor) ||
         VisitAs<torch::optim::AdagradParamState>(state, visitor) ||
         VisitAs<torch::optim::RMSpropParamState>(state, visitor);
}

absl::Status Unknown() {
  return absl::InvalidArgumentError(
      "the state of this optimizer is not known: it can be taken of SGD, Adam, "
      "AdamW, Adagrad and RMSprop of torch::optim");
}

template <typename Optimizer>
bool Is(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const Optimizer*>(&optimizer) != nullptr;
}

std::unique_ptr<OptimizerParamState> EmptyState(
    const torch::optim::Optimizer& optimizer) {
  if (Is<torch::optim::AdamW>(optimizer)) {
    return std::make_unique<torch::optim::AdamWParamState>();
  }
  if (Is<torch::optim::Adam>(optimizer)) {
    return std::make_unique<torch::optim::AdamParamState>();
  }
  if (Is<torch::optim::SGD>(optimizer)) {
    return std::make_unique<torch::optim::SGDParamState>();
  }
  if (Is<torch::optim::Adagrad>(optimizer)) {
    return std::make_unique<torch::optim::AdagradParamState>();
  }
  if (Is<torch::optim::RMSprop>(optimizer)) {
    return std::make_unique<torch::optim::RMSpropParamState>();
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<OptimizerSlots> ReadSlots(const OptimizerParamState& state) {
  Reader reader;
  // The accessors are not const.
  if (!VisitAny(const_cast<OptimizerParamState&>(state), reader)) {
    return Unknown();
  }
  return reader.slots;
}

absl::StatusOr<std::unique_ptr<OptimizerParamState>> MakeState(
    const torch::optim::Optimizer& optimizer, const OptimizerSlots& slots) {
  std::unique_ptr<OptimizerParamState> state = EmptyState(optimizer);
  if (state == nullptr) return Unknown();
  Writer writer{slots};
  VisitAny(*state, writer);
  for (const auto& [name, tensor] : writer.slots.tensors) {
    return absl::InvalidArgumentError(
        absl::StrCat("this optimizer has no state named ", name));
  }
  for (const auto& [name, number] : writer.slots.numbers) {
    return absl::InvalidArgumentError(
        absl::StrCat("this optimizer has no state named ", name));
  }
  return state;
}

}  // namespace fsdp
