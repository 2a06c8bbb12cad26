// Fully Sharded Data Parallel for LibTorch: the public API.
//
//   // comm/bootstrap/bootstrap.h
//   std::shared_ptr<fsdp::comm::Communicator> ranks = ...;
//   fsdp::Options options;
//   options.wrap_policy = fsdp::WrapModules<BlockImpl>();   // units
//   auto model = fsdp::ValueOrThrow(
//       fsdp::FullyShard(std::make_shared<NetImpl>(), ranks, options));
//   torch::optim::AdamW optimizer(model->Parameters());
//   auto loss = Loss(model->forward(input), target);
//   absl::Status status = model->Backward(loss);
//   optimizer.step();
//   optimizer.zero_grad();
//
// Every rank runs the same program on its own part of the batch, and gradients
// are the mean over ranks. A parent calls a child that is a unit by
// fsdp::Forward(child, x); a torch::nn::Sequential needs no change.
//
// Threads: a model belongs to the thread that runs its forward. Errors: calls
// return absl::Status; forward() and autograd nodes, which cannot, throw
// StatusError (base/status_macros.h) with the same Status inside.
#ifndef FSDP_FULLY_SHARDED_DATA_PARALLEL_H_
#define FSDP_FULLY_SHARDED_DATA_PARALLEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/module_forward.h"
#include "base/status_macros.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/model/forward.h"
#include "fsdp/options/options.h"
#include "fsdp/runtime/reduction_hooks.h"
#include "fsdp/state/whole_model.h"
#include "ranges/tensor_range.h"

namespace torch::optim {
class LBFGS;
}  // namespace torch::optim

namespace fsdp {

class ShardedModel;

namespace comm {
class Communicator;
class Mesh;
}  // namespace comm

// The scope that ShardedModuleBase::NoSync() returns. Scopes may be nested.
class NoSyncScope {
 public:
  explicit NoSyncScope(std::shared_ptr<ShardedModel> model);
  NoSyncScope(NoSyncScope&&) noexcept = default;
  NoSyncScope& operator=(NoSyncScope&&) = delete;
  ~NoSyncScope();

 private:
  std::shared_ptr<ShardedModel> model_;
  const bool before_;
};

// The part of a sharded module that does not depend on its forward.
//
// All ranks call collective methods in the same order. If one rank refuses a
// call (InvalidArgument, FailedPrecondition), all do, and nothing has changed.
// After any other error, such as a lost rank, the communicator is of no more
// use, and the call may have written a part of its results.
class ShardedModuleBase : public torch::nn::Module {
 public:
  // Returns this rank's range of each parameter: leaves for an element-wise
  // torch::optim optimizer (see MakeOptimizer() and CheckOptimizer()).
  // Each is 1-D, possibly empty, and has the parameter's dtype and device. The
  // order, unit by unit, is that of Ranges() on every rank, not that of
  // module()->parameters(). LBFGS and clip_grad_norm_ need all elements and do
  // not work; see ClipGradNorm().
  // Backward sets `.grad`, of the same size, and leaves it undefined where no
  // rank has produced a gradient. The next backward reuses the gradients'
  // memory: copy a gradient that has to outlive it.
  std::vector<at::Tensor> Parameters() const;
  // The tensors of Parameters() with names and full shapes, for parameter
  // groups.
  const std::vector<TensorRange>& Ranges() const;

  // Runs loss.backward(), with errors as a Status. Collective. An error may
  // concern this rank alone. After it the model is ready for the next
  // iteration, units that backward has finished have their gradients, and the
  // communicator is aborted so that the peers end, too
  // (Options::abort_on_failure). InvalidArgument: the loss is not one element
  // that requires grad; nothing was done. A plain loss.backward() works as
  // well, but tells the peers nothing when it throws.
  absl::Status Backward(const at::Tensor& loss, bool retain_graph = false);

  // Scales all gradients so that their `norm_type`-norm over all ranks is at
  // most `max_norm`, and returns the norm before scaling. Call it between
  // Backward() and the optimizer's step. Collective. The norm has no
  // dimensions and the same bits on all ranks; it is on the shards' device,
  // float64 if a shard is and float32 otherwise, and the host does not wait
  // for it. A norm that is infinite or NaN makes gradients zero or NaN, as
  // torch's clip_grad_norm_ does. If the all-reduce fails, gradients do not
  // change. InvalidArgument, on this rank alone: a number is not positive.
  // fsdp/optim/training_step.h has more choices.
  absl::StatusOr<at::Tensor> ClipGradNorm(double max_norm,
                                          double norm_type = 2.0);

  // Makes backwards step the optimizer, unit by unit, until it is called with
  // null. `step` gets a unit's shards as soon as their gradients are complete,
  // steps them and drops the gradients, so that those of a unit or two are
  // alive at a time. While it runs, no other shard has a gradient. With a
  // torch::optim optimizer over Parameters(), which skips shards without one:
  //   [&](auto) { optimizer.step(); optimizer.zero_grad();
  //               return absl::OkStatus(); }
  // FailedPrecondition: inside a forward or backward, or with
  // OffloadOptions::keep.
  absl::Status StepInBackward(
      std::function<absl::Status(absl::Span<const TensorRange>)> step);
  // Replaces the communicator's reductions, for example by
  // CompressedReduceScatter(); null keeps the communicator's.
  // FailedPrecondition: the model has hooks already, or is inside a forward or
  // backward.
  absl::Status SetReductionHooks(ReduceScatterHook reduce_scatter,
                                 AllReduceHook all_reduce = nullptr);
  // Sets what gradients are divided by before and after reductions, in place of
  // Options::gradients. InvalidArgument: a factor is not positive.
  // FailedPrecondition: inside a forward or backward.
  absl::Status SetGradientDivideFactors(double before, double after);

  // Freezes or unfreezes a parameter from the next forward on. All ranks make
  // the same call. The next reduction drops what backwards under NoSync() have
  // kept for a frozen one. NotFound: no parameter has this name.
  // InvalidArgument: the parameter holds bytes, which have no gradient.
  // FailedPrecondition: inside a forward, a backward or a scope of full
  // parameters.
  absl::Status SetTrainable(absl::string_view name, bool trainable);

  // In its scope backwards keep gradients whole on this rank instead of
  // reducing them. The first backward after it reduces the sum. All ranks open
  // the same scopes.
  [[nodiscard]] NoSyncScope NoSync() { return NoSyncScope(model_); }

  // Drops or zeroes all gradients, as an optimizer's zero_grad() does, and
  // also those that a NoSync() scope has left whole, which no optimizer sees.
  // NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
  void zero_grad(bool set_to_none = true) override;

  // Calls `visit` with each full parameter in its own shape, and holds one unit
  // in memory at a time. Collective. If the visitor of one rank fails, all
  // ranks return its error: units visited before are written back, that unit
  // and later ones are not.
  absl::Status ForEachFullParameter(
      const FullParameterVisitor& visit,
      const VisitOptions& options = VisitOptions()) {
    return fsdp::ForEachFullParameter(*model_, visit, options);
  }
  // Provides all full parameters at once, while the scope lives. Collective.
  // fsdp::SummonFullParams() (whole_model.h) does so for a module inside.
  absl::StatusOr<FullParamsScope> SummonFullParams(
      const SummonOptions& options = SummonOptions()) {
    return fsdp::SummonFullParams(wrapped(), options);
  }

  // These make and load state dicts in memory, between steps (whole_model.h).
  // Collective. A dict that does not fit is refused on all ranks, with nothing
  // changed. This form has values of the parameters' own shapes.
  absl::StatusOr<StateDict> GatherStateDict(
      const StateDictOptions& options = StateDictOptions()) const {
    return fsdp::GatherStateDict(*model_, wrapped(), options);
  }
  absl::Status LoadStateDict(const StateDict& dict,
                             const LoadOptions& options = LoadOptions()) {
    return fsdp::LoadStateDict(*model_, wrapped(), dict, options);
  }
  // This form has this rank's range of each parameter, for any number of ranks.
  absl::StatusOr<ShardedStateDict> MakeShardedStateDict() const {
    return fsdp::MakeShardedStateDict(*model_, wrapped());
  }
  absl::Status LoadShardedStateDict(absl::Span<const TensorRange> pieces,
                                    const StateDict& others) {
    return fsdp::LoadShardedStateDict(*model_, wrapped(), pieces, others);
  }

  // These do the same for states of an optimizer over Parameters().
  absl::StatusOr<OptimizerStateDict> GatherOptimizerState(
      torch::optim::Optimizer& optimizer,
      const StateDictOptions& options = StateDictOptions()) const {
    return fsdp::GatherOptimizerState(*model_, optimizer, options);
  }
  absl::Status LoadOptimizerState(torch::optim::Optimizer& optimizer,
                                  const OptimizerStateDict& dict) {
    return fsdp::LoadOptimizerState(*model_, optimizer, dict);
  }
  absl::StatusOr<ShardedOptimizerState> MakeShardedOptimizerState(
      torch::optim::Optimizer& optimizer) const {
    return fsdp::MakeShardedOptimizerState(*model_, optimizer);
  }
  absl::Status LoadShardedOptimizerState(
      torch::optim::Optimizer& optimizer, absl::Span<const TensorRange> tensors,
      const std::map<std::string, int64_t>& numbers,
      const std::vector<OptimizerGroup>& groups) {
    return fsdp::LoadShardedOptimizerState(*model_, optimizer, tensors, numbers,
                                           groups);
  }

  // Makes rank 0 write a file that torch::load() reads into the unwrapped
  // module, or into a sharded one on all ranks. The file appears at `path` when
  // it is complete; if rank 0 fails, all ranks return its error and `path` is
  // as before. Collective. torch::save(model, path) calls this and throws
  // StatusError.
  absl::Status Save(const std::string& path) const;
  // torch::save() to a stream, which every rank has, and torch::load() call
  // these. Collective. They throw StatusError.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Gathers all units ahead of use; see whole_model.h. Collective. An error may
  // concern this rank alone.
  absl::StatusOr<std::vector<RebuiltParameter>> RebuildFullParams() {
    return fsdp::RebuildFullParams(*model_);
  }

  // Bytes of gathered parameters and of reduce buffers, current and peak.
  MemoryStats memory_stats() const;
  // Predicts the memory that this rank will need, by kind.
  MemoryPlan PlanMemory(
      const MemoryPlanOptions& options = MemoryPlanOptions()) const;
  // Describes the units with strategies, sizes and dtypes, and the memory plan.
  std::string Describe() const;
  // Tells what rests off the device and what that costs; nothing without
  // Options::offload. Describe() shows the plan.
  std::optional<OffloadStats> offload_stats() const;
  comm::Communicator& communicator() const;  // of all ranks of the model

  // The model underneath, for other parts of this library. Not for users.
  ShardedModel& sharded_model() { return *model_; }
  const ShardedModel& sharded_model() const { return *model_; }

 protected:
  ShardedModuleBase(std::string name, std::shared_ptr<ShardedModel> model)
      : torch::nn::Module(std::move(name)), model_(std::move(model)) {}

 private:
  // The wrapped module without its type.
  torch::nn::Module& wrapped() { return *children().front(); }
  const torch::nn::Module& wrapped() const { return *children().front(); }

  const std::shared_ptr<ShardedModel> model_;
};

namespace internal {

struct CallSharded {
  template <typename Wrapper, typename... Args>
  static auto Call(Wrapper& wrapper, Args&&... args) {
    return Forward(*wrapper.module(), std::forward<Args>(args)...);
  }
};

}  // namespace internal

// A sharded `M`, which is a module class such as torch::nn::LinearImpl.
// FullyShard() makes it.
template <typename M>
class FullyShardedDataParallelImpl
    : public ShardedModuleBase,
      public ForwardLike<FullyShardedDataParallelImpl<M>, M,
                         internal::CallSharded> {
 public:
  FullyShardedDataParallelImpl(std::shared_ptr<M> module,
                               std::shared_ptr<ShardedModel> model)
      : ShardedModuleBase("fsdp::FullyShardedDataParallel", std::move(model)),
        module_(register_module("module", std::move(module))) {}

  // The wrapped module. Its own tensors hold values only during forward and
  // backward.
  const std::shared_ptr<M>& module() const { return module_; }

 private:
  const std::shared_ptr<M> module_;
};

// A holder with the value semantics of torch::nn modules: copies refer to the
// same model. `operator->` gives the sharded module, so that forward cannot
// bypass it.
template <typename M>
class FullyShardedDataParallel
    : public torch::nn::ModuleHolder<FullyShardedDataParallelImpl<M>> {
 public:
  using torch::nn::ModuleHolder<FullyShardedDataParallelImpl<M>>::ModuleHolder;

  // The wrapped module.
  const std::shared_ptr<M>& module() const { return this->get()->module(); }
};

// These are FullyShard() without the type of the module, which calls them.
absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options);
absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root,
    std::shared_ptr<comm::Communicator> ranks, const Options& options);

// Shards `module` over `ranks`, a mesh or a communicator, whose group is a mesh
// of one dimension. Collective. Afterwards the module's parameters hold values
// only while their unit computes. In a mesh of two dimensions the first
// replicates and the second shards, for units whose strategy is hybrid. Units
// are sharded one after another: beyond the units that are still to be sharded,
// a rank holds its shards and at most two copies of one unit. Modules do not
// change, except that a Sequential calls its children that are units through
// fsdp::Forward.
//
// All ranks check before anything is changed. If one rank refuses, all refuse
// with the same text, and the module is unchanged:
//   InvalidArgument     there are no parameters, or some cannot be sharded;
//                       one unit is on two devices; options make no sense,
//                       alone or with this mesh; models or options differ
//                       between ranks
//   FailedPrecondition  parameters belong to a unit already, or an optimizer
//                       seems to hold them; inference mode is on; a
//                       DeferredInit scope is open
// After any other error the mesh is aborted and the module of no more use,
// since some of its units may be sharded: make it anew in a new group.
template <typename M, typename Ranks>
absl::StatusOr<FullyShardedDataParallel<M>> FullyShard(
    std::shared_ptr<M> module, Ranks&& ranks,
    const Options& options = Options()) {
  FSDP_ASSIGN_OR_RETURN(
      std::shared_ptr<ShardedModel> model,
      ShardModule(module, std::forward<Ranks>(ranks), options));
  return FullyShardedDataParallel<M>(
      std::make_shared<FullyShardedDataParallelImpl<M>>(std::move(module),
                                                        std::move(model)));
}

// Shards the module of a holder, such as torch::nn::Linear.
template <typename M, typename Ranks>
absl::StatusOr<FullyShardedDataParallel<M>> FullyShard(
    const torch::nn::ModuleHolder<M>& module, Ranks&& ranks,
    const Options& options = Options()) {
  return FullyShard(module.ptr(), std::forward<Ranks>(ranks), options);
}

// Describes a model as its Describe() does, without the type of its module.
std::string Describe(const ShardedModel& model);

// These two choose the units whose gradients backwards reduce, and how far, as
// PyTorch's set_requires_gradient_sync() and set_requires_all_reduce() do. They
// apply to the unit that `module` is and, with `recurse`, to all units inside
// it, from the next backward on. For a sharded model pass its module(). All
// ranks make the same calls, between steps. FailedPrecondition: there is no
// such unit, or it is inside a forward or backward.

// Sets whether backwards reduce the units' gradients. If not, gradients stay
// whole on each rank until a backward reduces the sum. Inside NoSync() nothing
// is reduced in any case.
absl::Status SetRequiresGradientSync(torch::nn::Module& module, bool required,
                                     bool recurse = true);

// Sets whether backwards that reduce gradients also all-reduce them over the
// replicate group, for units that have one (hybrid sharding, kNoShard). If not,
// the reduce-scattered gradients are kept, one shard in the reduce dtype, until
// a backward all-reduces the sum.
absl::Status SetRequiresAllReduce(torch::nn::Module& module, bool required,
                                  bool recurse = true);

// These hooks, for SetReductionHooks(), reduce gradients in `dtype`, fp16 or
// bf16, although they are kept in a wider one. They send half the bytes, and
// the sums are rounded. They follow PyTorch's fp16_compress_hook and
// bf16_compress_hook.
ReduceScatterHook CompressedReduceScatter(c10::ScalarType dtype);
AllReduceHook CompressedAllReduce(c10::ScalarType dtype);

// --- Optimizers --------------------------------------------------------------
// Throws StatusError, InvalidArgument, if `optimizer` steps pieces of a
// parameter differently from the whole, as LAMB, Muon and Adafactor do, or if
// its step of one parameter depends on others. It tries a few steps on tensors
// of its own, and accepts an optimizer that needs more than that to step.
// Groups, states and gradients are as before; other counters of steps in the
// optimizer count these, too.
void ProbeOptimizer(torch::optim::Optimizer& optimizer);

// Makes an optimizer over all shards of `model`:
//   auto optimizer = fsdp::MakeOptimizer<torch::optim::AdamW>(
//       *model, torch::optim::AdamWOptions(3e-4));
// Probes a second one, made with the same arguments, and throws as
// ProbeOptimizer() does.
template <typename Optimizer, typename... Args>
Optimizer MakeOptimizer(const ShardedModuleBase& model, Args&&... args) {
  static_assert(!std::is_base_of_v<torch::optim::LBFGS, Optimizer>,
                "LBFGS computes over all elements of all parameters, and a "
                "rank has a part of them: use an element-wise optimizer");
  if constexpr (std::is_constructible_v<Optimizer, std::vector<at::Tensor>,
                                        const std::decay_t<Args>&...>) {
    Optimizer probed(std::vector<at::Tensor>(), std::as_const(args)...);
    ProbeOptimizer(probed);
  }
  return Optimizer(model.Parameters(), std::forward<Args>(args)...);
}

// Returns the trainable shards of `model` as two groups of an optimizer, both
// with `options`: parameters of two dimensions or more, and the others, such as
// biases and norms, without weight decay.
//   fsdp::FusedAdamW optimizer(fsdp::DecayGroups(*model, options), options);
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> DecayGroups(
    const ShardedModuleBase& model, const Options& options) {
  std::vector<at::Tensor> matrices, others;
  for (const TensorRange& named : model.Ranges()) {
    if (!named.values.requires_grad()) continue;
    (named.sizes.size() >= 2 ? matrices : others).push_back(named.values);
  }
  Options none = options;
  none.weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(options));
  groups.emplace_back(others, std::make_unique<Options>(none));
  return groups;
}

// Selects what CheckOptimizer() allows.
struct OptimizerCheckOptions {
  // The ways to treat shards that no group has.
  enum class Missing {
    kRefuse,
    kWarn,
    kAccept,
  };
  // Selects what happens to trainable shards in no group, which would never
  // change unless another optimizer has them.
  Missing missing = Missing::kRefuse;
  // Accepts leaves that do not belong to this model but, say, to a second one.
  bool allow_others = false;
};

// Checks that steps of `optimizer` train `model`. It sends nothing; all ranks
// that have made the same groups get the same answer.
//   InvalidArgument     it is LBFGS, or ProbeOptimizer() refuses it; a shard is
//                       in it twice; `options` do not allow missing shards or
//                       other leaves
//   FailedPrecondition  it has the module's own parameters, as an optimizer
//                       does that was made before sharding; it cannot step
//                       shards that are offloaded; the data of a shard or of a
//                       module's tensor was replaced
absl::Status CheckOptimizer(
    const ShardedModuleBase& model, const torch::optim::Optimizer& optimizer,
    const OptimizerCheckOptions& options = OptimizerCheckOptions());

}  // namespace fsdp

namespace torch {

// Saves a sharded model to a file by model->Save(path).
template <typename M, typename Path,
          typename =
              std::enable_if_t<std::is_convertible_v<const Path&, std::string>>>
void save(const fsdp::FullyShardedDataParallel<M>& model, Path&& path) {
  fsdp::ThrowIfError(model->Save(path));
}

}  // namespace torch

#endif  // FSDP_FULLY_SHARDED_DATA_PARALLEL_H_
