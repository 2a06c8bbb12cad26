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

#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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
class ShardedModuleBase : public torch::nn::Module {
 public:
  // Leaves for an element-wise torch::optim optimizer (not LBFGS, which needs
  // all elements, as does clip_grad_norm_: see ClipGradNorm();
  // optimizer_check.h makes optimizers and tells what is wrong with one): this
  // rank's range of each parameter, 1-D, maybe empty, on every rank in the same
  // order.
  // `.grad` is set by backward, undefined where no rank has produced a
  // gradient. The memory of gradients is reused: copy what has to outlive the
  // next backward.
  std::vector<at::Tensor> Parameters() const;
  // The same with names and full shapes, for parameter groups.
  const std::vector<NamedShard>& NamedShards() const {
    return model_->NamedShards();
  }

  // loss.backward(), with errors as a Status: the model is ready for the next
  // iteration afterwards, and the communicator aborted so that the peers end,
  // too (Options::abort_on_failure). A plain loss.backward() works as well, but
  // tells the peers nothing when it throws.
  absl::Status Backward(const at::Tensor& loss, bool retain_graph = false) {
    return model_->Backward(loss, retain_graph);
  }

  // Between Backward() and the optimizer's step: scales all gradients so that
  // their norm over all ranks is at most `max_norm`, and returns what it was.
  // Collective. More choices: fsdp/optim/grad_clip.h.
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
  // communicator's. Once per model.
  absl::Status SetReductionHooks(ReduceScatterHook reduce_scatter,
                                 AllReduceHook all_reduce = nullptr) {
    return model_->SetReductionHooks(std::move(reduce_scatter),
                                     std::move(all_reduce));
  }
  absl::Status SetGradientDivideFactors(double before, double after) {
    return model_->SetGradientDivideFactors(before, after);
  }

  // Freezes or unfreezes a parameter from the next forward on. All ranks alike.
  absl::Status SetTrainable(absl::string_view name, bool trainable) {
    return model_->SetTrainable(name, trainable);
  }

  // Backwards inside the scope keep their gradients whole on this rank instead
  // of reducing them; the first one after it reduces the sum. All ranks alike.
  [[nodiscard]] NoSyncScope NoSync() { return NoSyncScope(model_); }

  // Gradients start anew, as by an optimizer's zero_grad(), also those that a
  // NoSync() scope has left whole, which no optimizer knows of.
  void zero_grad(bool set_to_none = true) override;

  // Visits each full parameter, holding one unit at a time. Collective.
  absl::Status ForEachFullParameter(
      const FullParameterVisitor& visit,
      const VisitOptions& options = VisitOptions()) {
    return fsdp::ForEachFullParameter(*model_, visit, options);
  }
  // All full parameters at once, for as long as the scope lives. Collective.
  absl::StatusOr<FullParamsScope> SummonFullParams(
      const SummonOptions& options = SummonOptions()) {
    return fsdp::SummonFullParams(wrapped(), options);
  }
  // State dicts, in memory; see state_dict.h and optimizer_state.h, which have
  // more kinds. Collective.
  absl::StatusOr<fsdp::StateDict> StateDict(
      const StateDictOptions& options = StateDictOptions()) const;
  absl::Status LoadStateDict(const fsdp::StateDict& dict,
                             const LoadOptions& options = LoadOptions());
  absl::StatusOr<OptimizerStateDict> OptimizerState(
      torch::optim::Optimizer& optimizer,
      const StateDictOptions& options = StateDictOptions());
  absl::Status LoadOptimizerState(torch::optim::Optimizer& optimizer,
                                  const OptimizerStateDict& dict);

  // Rank 0 writes a file that torch::load() reads into the unwrapped module,
  // or into a sharded one on all ranks. It appears at `path` once it is whole.
  // Collective; all ranks return an error of rank 0. torch::save(model, path)
  // is this, and throws StatusError.
  absl::Status Save(const std::string& path) const;
  // For torch::save() to a stream, of which every rank has one, and
  // torch::load(). Collective. Throw StatusError.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Gathers all units ahead of use; see full_params.h.
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
  comm::Communicator& communicator() const { return model_->communicator(); }

  // The model underneath and the wrapped module without its type, for functions
  // in other headers that take them.
  ShardedModel& sharded_model() const { return *model_; }
  torch::nn::Module& wrapped() const { return *children().front(); }

 protected:
  ShardedModuleBase(std::string name, std::shared_ptr<ShardedModel> model)
      : torch::nn::Module(std::move(name)), model_(std::move(model)) {}

 private:
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

// Shards `module` over the ranks of `mesh`. Collective; see
// ShardModule() for what it refuses. The module's parameters afterwards hold
// values only while their unit computes.
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
