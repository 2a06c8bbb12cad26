// A model's author calls fsdp::Forward(module, args...), which runs any module,
// sharded or not, and fsdp::Tie(), which gives two parameters one value.
#ifndef FSDP_MODEL_FORWARD_H_
#define FSDP_MODEL_FORWARD_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/module_forward.h"
#include "fsdp/options/options.h"
#include "fsdp/recompute/checkpoint.h"

namespace fsdp {

// One forward of a module, which may be a unit. Without Finish(), because of an
// exception, the iteration is given up.
class ForwardScope {
 public:
  // Throws StatusError if the unit cannot be gathered.
  explicit ForwardScope(const torch::nn::Module& module);
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  ~ForwardScope();

  bool is_unit() const { return state_ != nullptr; }  // the module is one
  // Returns whether CastInputs() has to be called.
  bool casts_inputs() const;
  // Replaces these by tensors in the dtypes that the unit takes.
  void CastInputs(const std::vector<at::Tensor*>& inputs);
  // Returns whether WatchInput() has to be called for each input tensor.
  bool watches_inputs() const;
  // Notes a tensor that the forward is called with.
  void WatchInput(const at::Tensor& input);
  // Runs the module's forward. If an exception only follows from an error of
  // ours, that error is thrown instead.
  template <typename Call>
  auto Run(Call&& call) {
    try {
      return call();
    } catch (...) {
      OnException();
      throw;
    }
  }
  // Throws StatusError for what ShardedModel::PostForward() refuses.
  void Finish(const std::vector<at::Tensor*>& outputs);

 private:
  struct State;

  // Throws an error of ours that is the cause of the present exception, if
  // there is one; else keeps the exception's text, for the other ranks.
  void OnException();

  std::unique_ptr<State> state_;  // null: the module is no unit
};

// A unit whose forward backward will run again.
struct RecomputedUnit {
  std::string name;  // "blocks.3"
  // Includes the unit's module, whose buffers its forward may change.
  CheckpointOptions options;

  // Throws StatusError (FailedPrecondition): the call cannot be made again.
  [[noreturn]] void Refuse(const std::string& why) const;
};

// Returns the unit that `module` is, if Options::recompute.units names it and
// its forward is about to record.
std::optional<RecomputedUnit> FindRecomputed(const torch::nn::Module& module);

namespace forward_internal {

template <typename T>
inline constexpr bool kMayHoldTensors =
    HasVisibleTensors<T>::value &&
    !tensor_tree_internal::HoldsNoTensor<T>::value;

// Copies an argument whose tensors will be replaced, so that the caller's stay
// as they are; passes anything else on by reference.
template <typename Arg>
using HeldArgument = std::conditional_t<kMayHoldTensors<std::decay_t<Arg>>,
                                        std::decay_t<Arg>, Arg&&>;

template <typename Arg>
void WatchInputsIn([[maybe_unused]] ForwardScope& scope,
                   [[maybe_unused]] const Arg& arg) {
  if constexpr (std::is_base_of_v<at::Tensor, Arg>) {
    scope.WatchInput(arg);
  } else if constexpr (kMayHoldTensors<Arg> &&
                       std::is_copy_constructible_v<Arg>) {
    Arg copy = arg;
    for (at::Tensor* tensor : TensorsOf(copy)) scope.WatchInput(*tensor);
  }
}

template <typename Impl, typename... Args>
auto CallWithCastInputs(ForwardScope& scope, Impl& module, Args&&... args) {
  std::tuple<HeldArgument<Args>...> held(std::forward<Args>(args)...);
  std::vector<at::Tensor*> inputs;
  const auto collect = [&inputs](auto& part) {
    if constexpr (kMayHoldTensors<std::decay_t<decltype(part)>>) {
      for (at::Tensor* tensor : TensorsOf(part)) inputs.push_back(tensor);
    }
  };
  std::apply([&collect](auto&... parts) { (collect(parts), ...); }, held);
  scope.CastInputs(inputs);
  if (scope.watches_inputs()) {
    for (const at::Tensor* input : inputs) scope.WatchInput(*input);
  }
  return std::apply(
      [&module](auto&... parts) {
        return module.forward(static_cast<Args&&>(parts)...);
      },
      held);
}

template <typename Impl, typename... Args>
auto RunModule(Impl& module, Args&&... args) {
  using Result = decltype(module.forward(std::forward<Args>(args)...));
  static_assert(!std::is_reference_v<Result>,
                "fsdp::Forward: forward has to return its output by value");
  ForwardScope scope(module);
  if (!scope.is_unit()) return module.forward(std::forward<Args>(args)...);
  const auto call = [&]() -> Result {
    if constexpr (!std::is_void_v<Result>) {
      if (scope.casts_inputs()) {
        return CallWithCastInputs(scope, module, std::forward<Args>(args)...);
      }
    }
    if (scope.watches_inputs()) (WatchInputsIn(scope, args), ...);
    return module.forward(std::forward<Args>(args)...);
  };
  if constexpr (std::is_void_v<Result>) {
    scope.Run(call);
    scope.Finish({});
  } else {
    Result result = scope.Run(call);
    scope.Finish(TensorsOf(result));
    return result;
  }
}

// The type in which forward gets an argument out of a copy of its own.
template <typename Arg>
using PassedArgument = std::conditional_t<
    std::is_same_v<std::decay_t<Arg>,
                   std::remove_cv_t<std::remove_reference_t<Arg>>>,
    Arg&&, std::decay_t<Arg>&>;

// Calls forward with copies of the arguments, so that forward may consume them.
template <typename Impl, typename... Args>
struct RepeatableForward {
  Impl* module;

  auto operator()(const std::decay_t<Args>&... args) const {
    std::tuple<std::decay_t<Args>...> copies(args...);
    return std::apply(
        [this](auto&... parts) {
          return RunModule(*module,
                           static_cast<PassedArgument<Args>>(parts)...);
        },
        copies);
  }
};

template <typename Result, typename... Args>
inline constexpr bool kIsRepeatable =
    !std::is_void_v<Result> &&
    std::conjunction_v<HasVisibleTensors<Args>...,
                       std::is_copy_constructible<Args>...>;

template <typename Impl, typename... Args>
auto ForwardRecomputed(const RecomputedUnit& unit, Impl& module,
                       Args&&... args) {
  using Result = decltype(RunModule(module, std::forward<Args>(args)...));
  if constexpr (kIsRepeatable<Result, std::decay_t<Args>...>) {
    return checkpoint_internal::RunRegion(
        unit.options, unit.name, RepeatableForward<Impl, Args...>{&module},
        std::forward<Args>(args)...);
  } else {
    unit.Refuse(std::is_void_v<Result>
                    ? "it returns nothing"
                    : "it takes an argument of a type in which no tensors are "
                      "seen: define VisitTensors() for it");
    return RunModule(module, std::forward<Args>(args)...);
  }
}

template <typename Impl, typename... Args>
auto ForwardModule(Impl& module, Args&&... args) {
  if (const auto unit = FindRecomputed(module)) {
    return ForwardRecomputed(*unit, module, std::forward<Args>(args)...);
  }
  return RunModule(module, std::forward<Args>(args)...);
}

}  // namespace forward_internal

// Runs `module`'s forward. If the module is a unit, its parameters are gathered
// before and freed after, and backward runs it again if
// Options::recompute.units says so; otherwise this is a plain call. A parent
// calls children that may become units this way. `module` is a module, a
// shared_ptr or a module holder. Forward may get a copy of a container of
// tensors that it takes by non-const reference, so return what it is to hand
// back. Throws StatusError if gathering fails, or if the forward misuses
// parameters or cannot be recomputed as asked.
template <typename Module, typename... Args>
auto Forward(Module&& module, Args&&... args) {
  using Value = std::decay_t<Module>;
  if constexpr (std::is_base_of_v<torch::nn::Module, Value>) {
    return forward_internal::ForwardModule(module, std::forward<Args>(args)...);
  } else if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator,
                                         Value>) {
    return forward_internal::ForwardModule(*module.ptr(),
                                           std::forward<Args>(args)...);
  } else {
    return forward_internal::ForwardModule(*module,
                                           std::forward<Args>(args)...);
  }
}

// Makes the parameter `tied` share the memory of `parameter`, before sharding:
//   FSDP_RETURN_IF_ERROR(fsdp::Tie(net->embed->weight, net->head->weight));
// Both keep their names. After sharding they are one parameter of the innermost
// unit around both, gathered once, with the sum of the gradients; before it,
// each collects a gradient of its own. `a->weight = b->weight` does not tie: it
// replaces the member of `a`, but not the parameter that `a` has registered.
// InvalidArgument: one is undefined, or sizes, dtypes or devices differ.
// FailedPrecondition: one is sharded or has a gradient.
absl::Status Tie(const at::Tensor& parameter, const at::Tensor& tied);

}  // namespace fsdp

#endif  // FSDP_MODEL_FORWARD_H_
