#include "fsdp/state/optimizer_values.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <set>
#include <typeinfo>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "fsdp/resting/resting_places.h"

namespace fsdp {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

struct Reader {
  void Tensor(const char* name, const at::Tensor& tensor,
              bool /*is_of_option*/ = false) {
    if (tensor.defined()) slots.tensors[name] = tensor;
  }
  void Number(const char* name, int64_t number) {
    slots.numbers[name] = number;
  }

  OptimizerSlots slots;
};

// Returns whether a group steps with the slot of an option.
bool Uses(const torch::optim::OptimizerOptions& options,
          absl::string_view slot) {
  namespace optim = torch::optim;
  if (auto* adamw = dynamic_cast<const optim::AdamWOptions*>(&options)) {
    return adamw->amsgrad();
  }
  if (auto* adam = dynamic_cast<const optim::AdamOptions*>(&options)) {
    return adam->amsgrad();
  }
  const auto* rmsprop = dynamic_cast<const optim::RMSpropOptions*>(&options);
  return rmsprop != nullptr &&
         (slot == "grad_avg" ? rmsprop->centered() : rmsprop->momentum() > 0);
}

struct Writer {
  // A tensor that is not of an option is there after every step.
  void Tensor(const char* name, at::Tensor& tensor, bool is_of_option = false) {
    if (Move(name, slots.tensors, tensor)) return;
    if (is_of_option && (options == nullptr || !Uses(*options, name))) return;
    // A rank with no element of the parameter may have got none of its pieces.
    if (leaf.numel() == 0) {
      tensor = at::empty_like(leaf.detach());
    } else {
      missing = name;
    }
  }
  void Number(const char* name, int64_t& number) {
    if (!Move(name, slots.numbers, number)) missing = name;
  }
  template <typename T>
  static bool Move(const char* name, std::map<std::string, T>& from, T& to) {
    const auto found = from.find(name);
    if (found == from.end()) return false;
    to = found->second;
    from.erase(found);
    return true;
  }

  const at::Tensor& leaf;
  const torch::optim::OptimizerOptions* options;  // null: nobody steps it
  OptimizerSlots slots;                           // what has found no place yet
  std::string missing = "";
};

template <typename State, typename Visitor>
void VisitAdam(State& state, Visitor& visitor) {
  visitor.Number("step", state.step());
  visitor.Tensor("exp_avg", state.exp_avg());
  visitor.Tensor("exp_avg_sq", state.exp_avg_sq());
  visitor.Tensor("max_exp_avg_sq", state.max_exp_avg_sq(), true);
}

// Shows the visitor what the state's class has, by reference. Returns false if
// the class is not known.
template <typename Visitor>
bool Visit(OptimizerParamState& state, Visitor& visitor) {
  namespace optim = torch::optim;
  if (auto* adamw = dynamic_cast<optim::AdamWParamState*>(&state)) {
    VisitAdam(*adamw, visitor);
  } else if (auto* adam = dynamic_cast<optim::AdamParamState*>(&state)) {
    VisitAdam(*adam, visitor);
  } else if (auto* sgd = dynamic_cast<optim::SGDParamState*>(&state)) {
    visitor.Tensor("momentum_buffer", sgd->momentum_buffer());
  } else if (auto* adagrad = dynamic_cast<optim::AdagradParamState*>(&state)) {
    visitor.Number("step", adagrad->step());
    visitor.Tensor("sum", adagrad->sum());
  } else if (auto* rmsprop = dynamic_cast<optim::RMSpropParamState*>(&state)) {
    visitor.Number("step", rmsprop->step());
    visitor.Tensor("square_avg", rmsprop->square_avg());
    visitor.Tensor("momentum_buffer", rmsprop->momentum_buffer(), true);
    visitor.Tensor("grad_avg", rmsprop->grad_avg(), true);
  } else {
    return false;
  }
  return true;
}

absl::Status Unknown() {
  return absl::InvalidArgumentError(
      "the state of this optimizer is not known: it can be taken of SGD, Adam, "
      "AdamW, Adagrad and RMSprop of torch::optim");
}

// Makes a state for an optimizer of this kind.
template <typename Kind, typename State>
void MakeIf(const Optimizer& optimizer,
            std::unique_ptr<OptimizerParamState>& state) {
  if (dynamic_cast<const Kind*>(&optimizer) != nullptr) {
    state = std::make_unique<State>();
  }
}

absl::StatusOr<OptimizerSlots> ReadSlots(const OptimizerParamState& state) {
  Reader reader;
  // The accessors are not const.
  if (!Visit(const_cast<OptimizerParamState&>(state), reader)) {
    return Unknown();
  }
  return reader.slots;
}

// Makes a state for `leaf`, of the class that `optimizer` uses.
// InvalidArgument: the optimizer is not known, or its states do not have just
// these slots where a group of `options` steps the leaf.
absl::StatusOr<std::unique_ptr<OptimizerParamState>> MakeState(
    const Optimizer& optimizer, const at::Tensor& leaf,
    const torch::optim::OptimizerOptions* options,
    const OptimizerSlots& slots) {
  namespace optim = torch::optim;
  std::unique_ptr<OptimizerParamState> state;
  MakeIf<optim::AdamW, optim::AdamWParamState>(optimizer, state);
  MakeIf<optim::Adam, optim::AdamParamState>(optimizer, state);
  MakeIf<optim::SGD, optim::SGDParamState>(optimizer, state);
  MakeIf<optim::Adagrad, optim::AdagradParamState>(optimizer, state);
  MakeIf<optim::RMSprop, optim::RMSpropParamState>(optimizer, state);
  if (state == nullptr) return Unknown();
  Writer writer{leaf, options, slots};
  Visit(*state, writer);
  if (!writer.missing.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("its state has no ", writer.missing));
  }
  const auto& [tensors, numbers] = writer.slots;
  if (tensors.empty() && numbers.empty()) return state;
  return absl::InvalidArgumentError(absl::StrCat(
      "this optimizer has no state named ",
      tensors.empty() ? numbers.begin()->first : tensors.begin()->first));
}

std::string Sorted(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return absl::StrJoin(names, ", ");
}

// By their names; the first of those that have the same.
std::map<std::string, const OptimizerGroup*> ByNames(
    const std::vector<OptimizerGroup>& groups) {
  std::map<std::string, const OptimizerGroup*> result;
  for (const OptimizerGroup& group : groups) {
    result.try_emplace(Sorted(group.names), &group);
  }
  return result;
}

// Each with that of the same names.
absl::Status CheckSameGroups(
    const std::map<std::string, const OptimizerGroup*>& ours,
    const std::map<std::string, const OptimizerGroup*>& theirs) {
  for (const auto& [names, group] : ours) {
    if (theirs.count(names) > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the optimizer has a group of ", names,
                     ", which the state has not: make its groups as they were "
                     "when the state was taken"));
  }
  for (const auto& [names, group] : theirs) {
    if (ours.count(names) > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the state has a group of ", names,
                     ", which the optimizer has not: make its groups as they "
                     "were when the state was taken"));
  }
  return absl::OkStatus();
}

// With most names in common with `ours[index]`, which itself is the answer
// where nothing else is.
const OptimizerGroup* NearestGroup(const std::vector<OptimizerGroup>& ours,
                                   size_t index,
                                   const std::vector<OptimizerGroup>& theirs) {
  const std::set<std::string> names(ours[index].names.begin(),
                                    ours[index].names.end());
  const auto common = [&names](const OptimizerGroup& other) {
    return std::count_if(
        other.names.begin(), other.names.end(),
        [&names](const std::string& name) { return names.count(name) > 0; });
  };
  const bool is_as_many = theirs.size() == ours.size();
  const OptimizerGroup* nearest = is_as_many ? &theirs[index] : &ours[index];
  auto most = is_as_many ? common(theirs[index]) : 0;
  for (const OptimizerGroup& other : theirs) {
    const auto count = common(other);
    if (count <= most) continue;
    nearest = &other;
    most = count;
  }
  return nearest;
}

absl::Status PlanGroups(const std::vector<OptimizerGroup>& ours,
                        const std::vector<OptimizerGroup>& theirs, bool strict,
                        OptimizerReplacement* replacement) {
  std::map<std::string, const OptimizerGroup*> by_names;  // if `strict`
  if (strict) {
    by_names = ByNames(theirs);
    FSDP_RETURN_IF_ERROR(CheckSameGroups(ByNames(ours), by_names));
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    const OptimizerGroup& group = ours[i];
    const OptimizerGroup* const found = strict
                                            ? by_names.at(Sorted(group.names))
                                            : NearestGroup(ours, i, theirs);
    const torch::optim::OptimizerOptions* const theirs_options =
        found->options.get();
    const torch::optim::OptimizerOptions& own = *group.options;
    if (theirs_options == nullptr || typeid(*theirs_options) != typeid(own)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the state of the group of ", Sorted(group.names),
          " is of another class of optimizer: load it into one of the class "
          "it was taken from"));
    }
    replacement->options.push_back(found->options->clone());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TakeUpStates(Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return TakeUpStates(optimizer, all);
}

absl::Status TakeUpStates(Optimizer& optimizer,
                          absl::Span<const at::Tensor> leaves) {
  auto* const resting = dynamic_cast<RestingStates*>(&optimizer);
  return resting == nullptr ? absl::OkStatus()
                            : resting->TakeUpStatesOf(leaves);
}

absl::StatusOr<OptimizerValues> ReadOptimizerValues(
    absl::Span<const TensorRange> leaves, Optimizer& optimizer) {
  FSDP_RETURN_IF_ERROR(TakeUpStates(optimizer));
  std::map<const void*, const TensorRange*> by_leaf;
  for (const TensorRange& named : leaves) {
    by_leaf[named.values.unsafeGetTensorImpl()] = &named;
  }
  OptimizerValues values;
  for (const torch::optim::OptimizerParamGroup& group :
       optimizer.param_groups()) {
    OptimizerGroup& result = values.groups.emplace_back();
    result.options = group.options().clone();
    for (const at::Tensor& leaf : group.params()) {
      const auto named = by_leaf.find(leaf.unsafeGetTensorImpl());
      if (named == by_leaf.end()) {
        return absl::InvalidArgumentError(
            "the optimizer has a parameter that is no shard of this model: "
            "make it from Parameters() or Ranges()");
      }
      const std::string& name = named->second->name;
      result.names.push_back(name);
      const auto state = optimizer.state().find(leaf.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) continue;
      FSDP_ASSIGN_OR_RETURN(values.slots[name], ReadSlots(*state->second));
    }
  }
  return values;
}

std::map<std::string, std::vector<TensorRange>> SlotRanges(
    absl::Span<const TensorRange> leaves, const OptimizerValues& values) {
  std::map<std::string, std::vector<TensorRange>> ranges;
  for (const TensorRange& leaf : leaves) {
    const auto slots = values.slots.find(leaf.name);
    if (slots == values.slots.end()) continue;
    for (const auto& [key, tensor] : slots->second.tensors) {
      ranges[key].push_back(leaf.With(tensor));
    }
  }
  return ranges;
}

absl::StatusOr<OptimizerReplacement> PlanReplacement(
    absl::Span<const TensorRange> leaves, const Optimizer& optimizer,
    const OptimizerValues& present,
    const std::map<std::string, OptimizerSlots>& slots,
    const std::vector<OptimizerGroup>& groups, bool strict) {
  OptimizerReplacement replacement;
  FSDP_RETURN_IF_ERROR(
      PlanGroups(present.groups, groups, strict, &replacement));
  // The options of each parameter that is stepped.
  std::map<std::string, const torch::optim::OptimizerOptions*> stepped;
  for (size_t i = 0; i < present.groups.size(); ++i) {
    for (const std::string& name : present.groups[i].names) {
      stepped[name] = replacement.options[i].get();
    }
  }
  for (const TensorRange& named : leaves) {
    const auto options = stepped.find(named.name);
    const bool is_stepped = options != stepped.end();
    if (!strict && !is_stepped) continue;
    const auto found = slots.find(named.name);
    if (found == slots.end() ||
        (found->second.tensors.empty() && found->second.numbers.empty())) {
      if (!is_stepped ||
          dynamic_cast<const torch::optim::Adagrad*>(&optimizer) == nullptr) {
        continue;
      }
      return absl::InvalidArgumentError(absl::StrCat(
          named.name,
          ": there is no state of it, and torch::optim::Adagrad "
          "makes one only when it is constructed: load into an optimizer that "
          "does not step it"));
    }
    absl::StatusOr<std::unique_ptr<OptimizerParamState>> state =
        MakeState(optimizer, named.values,
                  is_stepped ? options->second : nullptr, found->second);
    if (!state.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(named.name, ": ", state.status().message()));
    }
    replacement.states.emplace_back(named.values.unsafeGetTensorImpl(),
                                    *std::move(state));
  }
  return replacement;
}

void ApplyOptions(const OptimizerReplacement& replacement,
                  Optimizer& optimizer) {
  std::set<const void*> successors;
  for (const auto& [leaf, state] : replacement.states) successors.insert(leaf);
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    torch::optim::OptimizerParamGroup& group = optimizer.param_groups()[i];
    group.set_options(replacement.options[i]->clone());
    for (const at::Tensor& leaf : group.params()) {
      if (successors.count(leaf.unsafeGetTensorImpl()) > 0) continue;
      optimizer.state().erase(leaf.unsafeGetTensorImpl());
    }
  }
}

absl::Status ApplyState(const at::Tensor& leaf, const OptimizerSlots& slots,
                        Optimizer& optimizer) {
  // The plan has seen whether the options need more slots.
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<OptimizerParamState> state,
                        MakeState(optimizer, leaf, /*options=*/nullptr, slots));
  optimizer.state()[leaf.unsafeGetTensorImpl()] = std::move(state);
  return absl::OkStatus();
}

void Apply(OptimizerReplacement replacement, Optimizer& optimizer) {
  ApplyOptions(replacement, optimizer);
  for (auto& [leaf, state] : replacement.states) {
    optimizer.state()[leaf] = std::move(state);
  }
}

}  // namespace fsdp
