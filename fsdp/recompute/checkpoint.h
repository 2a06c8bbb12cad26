// fsdp::Checkpoint(fn, args...): saves memory by computing twice.
//
//   at::Tensor forward(const at::Tensor& x) {
//     at::Tensor y = fsdp::Checkpoint(
//         [this](const at::Tensor& x) { return mlp->forward(x); }, x);
//     ...
//
// The call is a region. Its forward records nothing, so only its arguments and
// results stay alive, and backward runs it again (Chen et al., 2016). A region
// may be around units (`fn` calls fsdp::Forward), inside a unit's forward, and
// inside another region. A unit is still gathered twice and reduced once per
// use.
#ifndef FSDP_RECOMPUTE_CHECKPOINT_H_
#define FSDP_RECOMPUTE_CHECKPOINT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/module_forward.h"
#include "fsdp/options/options.h"

namespace fsdp {
namespace checkpoint_internal {

// A call with all that is needed to make it again.
class RepeatableCall {
 public:
  virtual ~RepeatableCall() = default;
  // Returns the tensors in the arguments.
  virtual std::vector<at::Tensor*> Arguments() = 0;
  // Makes the call and returns the tensors in its result.
  virtual std::vector<at::Tensor> Repeat() = 0;
};

template <typename Fn, typename... Args>
class RepeatableCallOf final : public RepeatableCall {
 public:
  template <typename F, typename... As>
  explicit RepeatableCallOf(F&& fn, As&&... args)
      : fn_(std::forward<F>(fn)), args_(std::forward<As>(args)...) {}

  auto Call() {
    return std::apply(
        [this](const Args&... args) { return std::invoke(fn_, args...); },
        args_);
  }

  std::vector<at::Tensor*> Arguments() override {
    std::vector<at::Tensor*> tensors;
    const auto collect = [&tensors](auto& part) {
      if constexpr (HasVisibleTensors<std::decay_t<decltype(part)>>::value) {
        for (at::Tensor* tensor : TensorsOf(part)) tensors.push_back(tensor);
      }
    };
    std::apply([&collect](auto&... parts) { (collect(parts), ...); }, args_);
    return tensors;
  }

  std::vector<at::Tensor> Repeat() override {
    auto result = Call();
    std::vector<at::Tensor> tensors;
    for (at::Tensor* tensor : TensorsOf(result)) tensors.push_back(*tensor);
    return tensors;
  }

 private:
  Fn fn_;
  std::tuple<Args...> args_;
};

// The forward of a region, which is either a call by a user or a unit that
// Options::recompute.units names. `unit` is the unit's name, or empty.
class RegionForward {
 public:
  RegionForward(const CheckpointOptions& options,
                const std::vector<at::Tensor*>& arguments,
                std::string unit = "");
  ~RegionForward();

  // Replaces the `outputs` that the call has made by aliases that recompute
  // them in backward, and views of arguments by differentiable views. Outputs
  // that are views of each other stay so. Throws StatusError when the call has
  // modified an argument in place.
  void Finish(std::unique_ptr<RepeatableCall> call,
              const std::vector<at::Tensor*>& outputs);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// Calls fn(args...) as a region, or without grad as a plain call.
template <typename Fn, typename... Args>
auto RunRegion(const CheckpointOptions& options, const std::string& unit,
               Fn&& fn, Args&&... args) {
  using Call = RepeatableCallOf<std::decay_t<Fn>, std::decay_t<Args>...>;
  using Result = decltype(std::declval<Call&>().Call());
  static_assert(!std::is_void_v<Result>,
                "fsdp::Checkpoint: the function has to return its result");
  auto call =
      std::make_unique<Call>(std::forward<Fn>(fn), std::forward<Args>(args)...);
  if (!c10::GradMode::is_enabled()) return call->Call();
  RegionForward region(options, call->Arguments(), unit);
  Result result = call->Call();
  region.Finish(std::move(call), TensorsOf(result));
  return result;
}

}  // namespace checkpoint_internal

// Calls fn(args...), and calls it again in backward. `fn` must do the same both
// times. It may use parameters of modules besides its arguments, but other
// tensors that require grad must be arguments. `fn` and `args` are copied or
// moved, and kept as long as the graph, so what they refer to must live as
// long. Tensors in `args` and in the result are found as fsdp::Forward finds
// them (see base/module_forward.h). Without grad this is a plain call.
//
// The call or its backward throws StatusError (FailedPrecondition) when `fn`
// modifies an argument in place, when an argument is modified between forward
// and backward, when the recomputation returns other shapes or dtypes, and for
// a backward with create_graph or with `inputs`, as torch::autograd::grad has.
// Backward also throws the error of the store of `offload` when an argument
// cannot be read.
template <typename Fn, typename... Args>
auto CheckpointWith(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  return checkpoint_internal::RunRegion(
      options, /*unit=*/"", std::forward<Fn>(fn), std::forward<Args>(args)...);
}

// Calls CheckpointWith() with the default options.
template <typename Fn, typename... Args>
auto Checkpoint(Fn&& fn, Args&&... args) {
  return CheckpointWith(CheckpointOptions(), std::forward<Fn>(fn),
                        std::forward<Args>(args)...);
}

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_CHECKPOINT_H_
