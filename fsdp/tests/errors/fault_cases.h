// Models that fail at a chosen point, and what is done with them.
#ifndef FSDP_TESTS_ERRORS_FAULT_CASES_H_
#define FSDP_TESTS_ERRORS_FAULT_CASES_H_

#include "fsdp/recompute/checkpoint.h"
#include "fsdp/tests/errors/fault_injector.h"

namespace fsdp::testing::faults {

// --- What is trained ---------------------------------------------------------

inline constexpr int64_t kDim = 3;

struct NetOptions {
  bool checkpoints = false;  // a region around a unit, and one inside each
  bool transparent = false;  // units are called directly
  bool frozen = false;       // the first unit
};

class Block : public torch::nn::Module {
 public:
  Block(FaultInjector* injector, bool checkpoints)
      : fc(register_module("fc", Linear(kDim, 2))),
        out(register_module("out", Linear(2, kDim))),
        injector_(injector),
        checkpoints_(checkpoints) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = [this](const at::Tensor& y) {
      return injector_->Pass("a unit's forward", fc->forward(y)).tanh();
    };
    const at::Tensor y = checkpoints_ ? Checkpoint(hidden, x) : hidden(x);
    return injector_->Pass("the end of a unit", x + out->forward(y));
  }

  Linear fc, out;

 private:
  FaultInjector* const injector_;
  const bool checkpoints_;
};

class Net : public torch::nn::Module {
 public:
  // `injector` must outlive the net.
  Net(FaultInjector* injector, const NetOptions& options)
      : first(register_module(
            "first", std::make_shared<Block>(injector, options.checkpoints))),
        second(register_module(
            "second", std::make_shared<Block>(injector, options.checkpoints))),
        head(register_module("head", Linear(kDim, kDim))),
        injector_(injector),
        options_(options) {
    FillParameters(*this, 0);
    if (!options.frozen) return;
    for (at::Tensor& parameter : first->parameters()) {
      parameter.set_requires_grad(false);
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto front = [this](const at::Tensor& y) {
      return injector_->Pass("behind a unit", Call(*first, y));
    };
    at::Tensor y = injector_->Pass("the root's forward", x);
    y = options_.checkpoints ? Checkpoint(front, y) : front(y);
    y = Call(*second, y);
    return injector_->Pass("the end of the root", head->forward(y));
  }

  std::shared_ptr<Block> first, second;
  Linear head;

 private:
  at::Tensor Call(Block& block, const at::Tensor& x) const {
    return options_.transparent ? block.forward(x) : Forward(block, x);
  }

  FaultInjector* const injector_;
  const NetOptions options_;
};

using Model = FullyShardedDataParallel<Net>;

// One model of one rank.
struct Trainer {
  at::Tensor graph;  // of the last forward, outlives the model
  Model model;
  FaultInjector* injector;
  double loss = 0;  // of the last iteration
};

// --- What is done with it ----------------------------------------------------

// An iteration throws on any error. `part` numbers the data.
using Iteration = void (*)(Trainer& trainer, int64_t part);

inline at::Tensor LossOf(Trainer& trainer, int64_t part) {
  const Communicator& world = trainer.model->communicator();
  const at::Tensor x = Rows(part * world.world_size() + world.rank(), 1, kDim);
  at::Tensor loss = Loss(trainer.model->forward(x), x);
  trainer.loss += loss.item<double>();
  trainer.graph = loss;
  return loss;
}

inline void Step(const TensorRange& named) {
  c10::NoGradGuard no_grad;
  at::Tensor shard = named.values;
  if (shard.grad().defined()) shard.sub_(shard.grad(), 0.1);
}

inline void StepAndZeroGrad(Trainer& trainer) {
  for (const TensorRange& named : trainer.model->Ranges()) Step(named);
  trainer.model->zero_grad();
}

inline void Negate(const at::Tensor& parameter) {
  c10::NoGradGuard no_grad;
  at::Tensor(parameter).neg_();
}

inline void Train(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->Backward(LossOf(trainer, part)));
  StepAndZeroGrad(trainer);
}

// Trains with the user's own backward().
inline void TrainByPlainBackward(Trainer& trainer, int64_t part) {
  const at::Tensor loss = LossOf(trainer, part);
  trainer.injector->Pass("the user's own loss");
  loss.backward();
  StepAndZeroGrad(trainer);
}

// Edits parameters one by one; the visitor may return its error.
inline void EditEach(Trainer& trainer, int64_t) {
  VisitOptions options;
  options.writeback = true;
  ThrowIfError(trainer.model->ForEachFullParameter(
      [&](const std::string& name, const at::Tensor& value) {
        FSDP_RETURN_IF_ERROR(
            trainer.injector->PassOrReturn(absl::StrCat("visiting ", name)));
        Negate(value);
        return absl::OkStatus();
      },
      options));
}

inline void Accumulate(Trainer& trainer, int64_t part) {
  {
    const NoSyncScope no_sync = trainer.model->NoSync();
    ThrowIfError(trainer.model->Backward(LossOf(trainer, 2 * part)));
  }
  ThrowIfError(trainer.model->Backward(LossOf(trainer, 2 * part + 1)));
  StepAndZeroGrad(trainer);
}

inline void TrainGatheredAhead(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->RebuildFullParams().status());
  Train(trainer, part);
}

// The optimizer is called by the model.
inline void TrainInBackward(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->Backward(LossOf(trainer, part)));
  trainer.model->zero_grad();
}

inline void EditInScope(Trainer& trainer, int64_t) {
  FullParamsScope scope = ValueOrThrow(trainer.model->SummonFullParams());
  for (const auto& item : trainer.model.module()->named_parameters()) {
    trainer.injector->Pass("a scope");
    Negate(item.value());
  }
  ThrowIfError(scope.Close());
}

inline void EditOnOneRank(Trainer& trainer, int64_t) {
  SummonOptions options;
  options.rank0_only = true;
  FullParamsScope scope =
      ValueOrThrow(trainer.model->SummonFullParams(options));
  if (trainer.model->communicator().rank() == 0) {
    for (const at::Tensor& p : trainer.model.module()->parameters()) Negate(p);
  }
  ThrowIfError(scope.Close());
}

inline void ClipAndSave(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->Backward(LossOf(trainer, part)));
  ThrowIfError(trainer.model->ClipGradNorm(1e-3).status());
  StepAndZeroGrad(trainer);
  const StateDict dict = ValueOrThrow(trainer.model->GatherStateDict());
  ThrowIfError(trainer.model->LoadStateDict(dict));
}

inline void Save(Trainer& trainer, int64_t) {
  ThrowIfError(trainer.model->GatherStateDict().status());
}

inline Options UnitsWith(ShardingStrategy strategy) {
  Options options = UnitsOf<Block>();
  options.unit.strategy = strategy;
  options.timeout = absl::Seconds(20);
  return options;
}

inline absl::Status AddHooks(Trainer& trainer, bool steps) {
  FaultInjector* injector = trainer.injector;
  if (steps) {
    return trainer.model->StepInBackward(
        [injector](absl::Span<const TensorRange> shards) -> absl::Status {
          FSDP_RETURN_IF_ERROR(injector->PassOrReturn("the step in backward"));
          for (const TensorRange& named : shards) {
            Step(named);
            named.values.mutable_grad().reset();
          }
          return absl::OkStatus();
        });
  }
  using Started = absl::StatusOr<std::unique_ptr<comm::Work>>;
  return trainer.model->SetReductionHooks(
      [injector](const ReduceScatterCall& call) -> Started {
        FSDP_RETURN_IF_ERROR(injector->PassOrReturn("the reduce-scatter hook"));
        return call.group.ReduceScatter(call.own, call.whole,
                                        comm::ReduceOp::kSum, call.unit);
      },
      [injector](const AllReduceCall& call) -> Started {
        FSDP_RETURN_IF_ERROR(injector->PassOrReturn("the all-reduce hook"));
        return call.group.AllReduce(call.own, comm::ReduceOp::kSum, call.unit);
      });
}

struct Case {
  std::string name;
  int world = 2;
  Options options;
  Iteration iterate = &Train;
  NetOptions net;
  int replicas = 1;
  bool hooks = false;            // the model's own hooks
  bool edits = false;            // parameters may have changed before an error
  bool frees_at_failure = true;  // rather than at the next step
  bool tells_peers = true;       // when one rank fails
  // Some collectives run outside forward and backward: if they fail, they may
  // abort their group whatever the options say.
  bool outside_iteration = false;
};

inline std::vector<Case> Cases() {
  using S = ShardingStrategy;
  std::vector<Case> cases;
  const auto add = [&cases](std::string name, int world, S strategy) -> Case& {
    Case& c = cases.emplace_back();
    c.name = std::move(name);
    c.world = world;
    c.options = UnitsWith(strategy);
    return c;
  };
  add("FullShardAlone", 1, S::kFullShard);
  add("FullShard", 3, S::kFullShard).options.reshard_root_after_forward = true;
  add("ShardGradOp", 2, S::kShardGradOp);
  add("ShardOptimizer", 2, S::kShardOptimizer);
  add("NoShard", 2, S::kNoShard);
  add("HybridShard", 4, S::kHybridShard).replicas = 2;
  add("BackwardGroups", 4, S::kFullShard).options.unit.backward_group_size = 2;
  Case& frozen = add("FrozenInBFloat16", 2, S::kFullShard);
  frozen.net.frozen = true;
  frozen.options.unit.precision = ComputeIn(at::kBFloat16);
  Case& plain = add("PlainBackward", 2, S::kFullShard);
  plain.iterate = &TrainByPlainBackward;
  plain.frees_at_failure = plain.tells_peers = false;
  Case regions = plain;
  regions.name = "PlainBackwardWithCheckpoints";
  regions.net.checkpoints = true;
  cases.push_back(std::move(regions));
  add("Accumulation", 2, S::kFullShard).iterate = &Accumulate;
  add("AccumulationOfOptimizerShards", 2, S::kShardOptimizer).iterate =
      &Accumulate;
  add("Checkpoints", 2, S::kFullShard).net.checkpoints = true;
  Case& accumulates = add("CheckpointsAndAccumulation", 3, S::kShardGradOp);
  accumulates.net.checkpoints = true;
  accumulates.iterate = &Accumulate;
  Case& transparent = add("Transparent", 2, S::kFullShard);
  transparent.options.transparent = transparent.net.transparent = true;
  Case& mixed = add("TransparentWithCheckpoints", 3, S::kShardGradOp);
  mixed.options.transparent = mixed.net.transparent = true;
  mixed.net.checkpoints = true;
  Case& hooks = add("Hooks", 4, S::kHybridShard);
  hooks.replicas = 2;
  hooks.hooks = true;
  Case& steps = add("StepInBackward", 2, S::kFullShard);
  steps.hooks = steps.edits = true;
  steps.iterate = &TrainInBackward;
  Case& ahead = add("GatheredAhead", 2, S::kFullShard);
  ahead.iterate = &TrainGatheredAhead;
  ahead.frees_at_failure = false;
  Case& clips = add("ClipAndSave", 2, S::kFullShard);
  clips.iterate = &ClipAndSave;
  clips.edits = clips.outside_iteration = true;
  for (const auto& [name, edit] :
       {std::pair<const char*, Iteration>("Scope", &EditInScope),
        {"ScopeOnOneRank", &EditOnOneRank},
        {"Save", &Save},
        {"Visitor", &EditEach}}) {
    Case& c = add(name, 4, S::kHybridShard);
    c.replicas = 2;
    c.iterate = edit;
    c.edits = c.outside_iteration = true;
  }
  return cases;
}

inline absl::StatusOr<Trainer> MakeTrainer(const Case& c,
                                           const std::shared_ptr<Net>& net,
                                           Communicator& world,
                                           FaultInjector* injector) {
  std::vector<comm::MeshDimension> dimensions = {{"shard", -1}};
  if (c.replicas > 1) {
    dimensions.insert(dimensions.begin(), {"replicate", c.replicas});
  }
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh,
                        Mesh::Create(Unowned(world), dimensions));
  FSDP_ASSIGN_OR_RETURN(Model model, FullyShard(net, mesh, c.options));
  Trainer trainer{at::Tensor(), std::move(model), injector};
  if (c.hooks) {
    FSDP_RETURN_IF_ERROR(
        AddHooks(trainer, /*steps=*/c.iterate == &TrainInBackward));
  }
  return trainer;
}

// Makes a trainer of a new net.
inline absl::StatusOr<Trainer> MakeTrainer(const Case& c, Communicator& world,
                                           FaultInjector* injector) {
  return MakeTrainer(c, std::make_shared<Net>(injector, c.net), world,
                     injector);
}

}  // namespace fsdp::testing::faults

#endif  // FSDP_TESTS_ERRORS_FAULT_CASES_H_
