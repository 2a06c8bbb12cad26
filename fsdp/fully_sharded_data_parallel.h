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
// Every rank runs the same program on its own part of the batch; gradients are
// the mean over ranks. A parent calls the children that are units by
// fsdp::Forward(child, x); children of a torch::nn::Sequential need nothing.
//
// Threads: a model belongs to the thread that runs its forward. Errors: calls
// return absl::Status; forward() and autograd nodes, which cannot, throw
// StatusError (base/status_error.h) with the same Status inside.
#ifndef FSDP_FULLY_SHARDED_DATA_PARALLEL_H_
#define FSDP_FULLY_SHARDED_DATA_PARALLEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/forward_like.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/describe/describe.h"
#include "fsdp/model/forward.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/options/options.h"
#include "fsdp/options/wrap_policy.h"
#include "fsdp/runtime/reduction_hooks.h"
#include "fsdp/shard_module.h"
#include "fsdp/state/full_params.h"
#include "fsdp/state/optimizer_state.h"
#include "fsdp/state/state_dict.h"

namespace fsdp {

// See ShardedModuleBase::NoSync(). Scopes may be nested.
class NoSyncScope {
 public:
  explicit NoSyncScope(std::shared_ptr<ShardedModel> model)
      : model_(std::move(model)), before_(model_->synchronizes()) {
    model_->SetSynchronizes(false);
  }
  NoSyncScope(NoSyncScope&&) noexcept = default;
  NoSyncScope& operator=(NoSyncScope&&) = delete;
  ~NoSyncScope() {
    if (model_ != nullptr) model_->SetSynchronizes(before_);
  }

 private:
  std::shared_ptr<ShardedModel> model_;
  const bool before_;
};

// What every sharded module offers, whatever its forward.
//
// All ranks make the same calls of what is collective. What one refuses
// (InvalidArgument, FailedPrecondition) all refuse, and nothing has changed.
// After any other error of a collective, of a rank that is lost for example,
// the communicator is of no more use, and what the call writes may be written
// in part.
class ShardedModuleBase : public torch::nn::Module {
 public:
  // Leaves for an element-wise torch::optim optimizer (not LBFGS, which needs
  // all elements, as does clip_grad_norm_: see ClipGradNorm();
  // optimizer_check.h makes optimizers and tells what is wrong with one): this
  // rank's range of each parameter, 1-D, maybe empty, in the dtype and on the
  // device that the parameter had, on every rank in the same order: that of
  // NamedShards(), unit by unit, and not of module()->parameters().
  // `.grad`, of the same size, is set by backward, undefined where no rank has
  // produced a gradient. The memory of gradients is reused: copy what has to
  // outlive the next backward.
  std::vector<at::Tensor> Parameters() const;
  // The same with names and full shapes, for parameter groups.
  const std::vector<NamedShard>& NamedShards() const {
    return model_->NamedShards();
  }

  // loss.backward() of one element, with errors as a Status. Collective. After
  // an error, which may be of this rank alone, the model is ready for the next
  // iteration, shards of units that backward has been through have their
  // gradients, and the communicator is aborted so that the peers end, too
  // (Options::abort_on_failure). InvalidArgument: not one element that requires
  // grad; nothing was done. A plain loss.backward() works as well, but tells
  // the peers nothing when it throws.
  absl::Status Backward(const at::Tensor& loss, bool retain_graph = false) {
    return model_->Backward(loss, retain_graph);
  }

  // Between Backward() and the optimizer's step: scales all gradients so that
  // their `norm_type`-norm over all ranks is at most `max_norm`, and returns
  // what it was: no dimensions, on the shards' device, for which the host does
  // not wait, float64 where a shard is and float32 otherwise, the same bits on
  // all ranks. A norm that is infinite or NaN makes gradients zero or NaN, as
  // torch's clip_grad_norm_ does. Collective. Gradients stay as they are where
  // the all-reduce fails. InvalidArgument, on this rank: a number that is not
  // positive. More choices: fsdp/optim/grad_clip.h.
  absl::StatusOr<at::Tensor> ClipGradNorm(double max_norm,
                                          double norm_type = 2.0);

  // Steps the optimizer inside backward, unit by unit, until it is called with
  // null; see ShardedModel. With a torch::optim optimizer over Parameters(),
  // which skips what has no gradient:
  //   [&](auto) { optimizer.step(); optimizer.zero_grad();
  //               return absl::OkStatus(); }
  absl::Status StepInBackward(ShardedModel::UnitStep step) {
    return model_->StepInBackward(std::move(step));
  }
  // Reductions by other means, such as those of comm_hooks.h; unset: the
  // communicator's. Once per model. FailedPrecondition: a second time, or
  // inside a forward or backward.
  absl::Status SetReductionHooks(ReduceScatterHook reduce_scatter,
                                 AllReduceHook all_reduce = nullptr) {
    return model_->SetReductionHooks(std::move(reduce_scatter),
                                     std::move(all_reduce));
  }
  // What gradients are divided by before and after reductions from now on, in
  // place of Options::gradients. InvalidArgument: not positive.
  // FailedPrecondition: inside a forward or backward.
  absl::Status SetGradientDivideFactors(double before, double after) {
    return model_->SetGradientDivideFactors(before, after);
  }

  // Freezes or unfreezes a parameter from the next forward on. All ranks alike.
  // NotFound: no such name. InvalidArgument: bytes, which have no gradient.
  // FailedPrecondition: not between steps.
  absl::Status SetTrainable(absl::string_view name, bool trainable) {
    return model_->SetTrainable(name, trainable);
  }

  // Backwards inside the scope keep their gradients whole on this rank instead
  // of reducing them; the first one after it reduces the sum. All ranks alike.
  [[nodiscard]] NoSyncScope NoSync() { return NoSyncScope(model_); }

  // Gradients start anew, as by an optimizer's zero_grad(), also those that a
  // NoSync() scope has left whole, which no optimizer knows of.
  // NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
  void zero_grad(bool set_to_none = true) override;

  // Visits each full parameter, of its own shape, holding one unit at a time.
  // Collective. An error of one rank's visitor is returned by all: what was
  // visited before is written back, that unit and later ones are not.
  absl::Status ForEachFullParameter(
      const FullParameterVisitor& visit,
      const VisitOptions& options = VisitOptions()) {
    return fsdp::ForEachFullParameter(*model_, visit, options);
  }
  // All full parameters at once, for as long as the scope lives. Collective.
  // fsdp::SummonFullParams() (full_params.h) does it for a module inside.
  absl::StatusOr<FullParamsScope> SummonFullParams(
      const SummonOptions& options = SummonOptions()) {
    return fsdp::SummonFullParams(wrapped(), options);
  }

  // State dicts in memory, between steps, as state_dict.h says. Collective;
  // loading says on all ranks what does not fit, with nothing changed.
  // Whole: values of the parameters' own shapes.
  absl::StatusOr<StateDict> GatherStateDict(
      const StateDictOptions& options = StateDictOptions()) const;
  absl::Status LoadStateDict(const StateDict& dict,
                             const LoadOptions& options = LoadOptions());
  // This rank's flat shards, for as many ranks.
  // This rank's range of each parameter, for any number of ranks.
  absl::StatusOr<ShardedStateDict> MakeShardedStateDict() const;
  absl::Status LoadShardedStateDict(absl::Span<const ParameterPiece> pieces,
                                    const StateDict& others);

  // The same for the states of an optimizer over Parameters(); see
  // optimizer_state.h.
  absl::StatusOr<OptimizerStateDict> GatherOptimizerState(
      torch::optim::Optimizer& optimizer,
      const StateDictOptions& options = StateDictOptions()) const;
  absl::Status LoadOptimizerState(torch::optim::Optimizer& optimizer,
                                  const OptimizerStateDict& dict);
  absl::StatusOr<ShardedOptimizerState> MakeShardedOptimizerState(
      torch::optim::Optimizer& optimizer) const;
  absl::Status LoadShardedOptimizerState(
      torch::optim::Optimizer& optimizer,
      absl::Span<const ParameterPiece> tensors,
      const std::map<std::string, int64_t>& numbers,
      const std::vector<OptimizerGroup>& groups);

  // Rank 0 writes a file that torch::load() reads into the unwrapped module,
  // or into a sharded one on all ranks. It appears at `path` once it is whole;
  // after an error of rank 0, which all ranks return, what was there is still
  // there. Collective. torch::save(model, path) is this, and throws
  // StatusError.
  absl::Status Save(const std::string& path) const;
  // For torch::save() to a stream, of which every rank has one, and
  // torch::load(). Collective. Throw StatusError.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Gathers all units ahead of use; see full_params.h. Collective. An error may
  // be of this rank alone.
  absl::StatusOr<std::vector<RebuiltParameter>> RebuildFullParams() {
    return fsdp::RebuildFullParams(*model_);
  }

  // Bytes of gathered parameters and of reduce buffers, now and at most.
  MemoryStats memory_stats() const { return model_->memory_stats(); }
  // The memory this rank will need, by kind.
  MemoryPlan PlanMemory(
      const MemoryPlanOptions& options = MemoryPlanOptions()) const {
    return fsdp::PlanMemory(*model_, options);
  }
  // The tree of units with strategies, sizes and dtypes, and the memory plan.
  std::string Describe() const { return fsdp::Describe(*model_); }
  // What rests elsewhere, and what that costs (fsdp/resting/offload_space.h);
  // null without Options::offload.
  const OffloadSpace* offload() const { return model_->offload(); }
  comm::Communicator& communicator() const { return model_->communicator(); }

  // Not for users: the model underneath, for other rooms of this library.
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

// The sharded `M`, a module class such as torch::nn::LinearImpl. Made by
// FullyShard().
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

  // The wrapped module, whose own tensors hold values during forward and
  // backward only.
  const std::shared_ptr<M>& module() const { return module_; }

 private:
  const std::shared_ptr<M> module_;
};

// Holder with the value semantics of torch::nn modules: copies refer to the
// same model. `operator->` is the sharded module, so forward cannot bypass it.
template <typename M>
class FullyShardedDataParallel
    : public torch::nn::ModuleHolder<FullyShardedDataParallelImpl<M>> {
 public:
  using torch::nn::ModuleHolder<FullyShardedDataParallelImpl<M>>::ModuleHolder;

  // The wrapped module.
  const std::shared_ptr<M>& module() const { return this->get()->module(); }
};

// Shards `module` over the ranks of `mesh`. Collective. The module's parameters
// afterwards hold values only while their unit computes.
//
// What one rank refuses all refuse with the same text, and the module is as it
// was (ShardModule() in shard_module.h lists what that is). After any other
// error the mesh is aborted and the module of no more use: some of its units
// may be sharded already. Make it anew in a new group.
template <typename M>
absl::StatusOr<FullyShardedDataParallel<M>> FullyShard(
    std::shared_ptr<M> module, const comm::Mesh& mesh,
    const Options& options = Options()) {
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<ShardedModel> model,
                        ShardModule(module, mesh, options));
  return FullyShardedDataParallel<M>(
      std::make_shared<FullyShardedDataParallelImpl<M>>(std::move(module),
                                                        std::move(model)));
}

// The same over the ranks of a group, a mesh of one dimension.
template <typename M>
absl::StatusOr<FullyShardedDataParallel<M>> FullyShard(
    std::shared_ptr<M> module, std::shared_ptr<comm::Communicator> communicator,
    const Options& options = Options()) {
  FSDP_ASSIGN_OR_RETURN(
      comm::Mesh mesh,
      comm::Mesh::Create(std::move(communicator), {{"shard", -1}}));
  return FullyShard(std::move(module), mesh, options);
}

// The same for a module holder, such as torch::nn::Linear. `ranks`: a mesh or
// a communicator.
template <typename M, typename Ranks>
absl::StatusOr<FullyShardedDataParallel<M>> FullyShard(
    const torch::nn::ModuleHolder<M>& module, Ranks&& ranks,
    const Options& options = Options()) {
  return FullyShard(module.ptr(), std::forward<Ranks>(ranks), options);
}

}  // namespace fsdp

namespace torch {

// torch::save() of a sharded model to a file: model->Save(path).
template <typename M, typename Path,
          typename =
              std::enable_if_t<std::is_convertible_v<const Path&, std::string>>>
void save(const fsdp::FullyShardedDataParallel<M>& model, Path&& path) {
  fsdp::ThrowIfError(model->Save(path));
}

}  // namespace torch

#endif  // FSDP_FULLY_SHARDED_DATA_PARALLEL_H_
