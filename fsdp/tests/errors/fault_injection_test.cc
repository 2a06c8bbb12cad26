// Training that fails at any of its points, one after the other: in user code,
// in autograd, in hooks and in collectives. Where all ranks fail alike, the
// next step is the one of a model that has never failed, bit by bit. Where one
// rank fails, its peers end with an error that names it. A parameter is never
// half written.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/mesh.h"
#include "comm/testing/run_ranks.h"
#include "comm/work.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/mixed_precision.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/fault_injector.h"
#include "fsdp/testing/toy_model.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::Mesh;
using ::fsdp::comm::testing::AllOk;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::FaultInjector;
using ::fsdp::testing::FaultType;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::InjectFaults;
using ::fsdp::testing::Loss;
using ::fsdp::testing::Rows;
using ::fsdp::testing::Unowned;
using ::fsdp::testing::UsersError;

constexpr int64_t kDim = 3;
constexpr FaultType kFaultTypes[] = {FaultType::kStatus, FaultType::kUsers,
                                     FaultType::kTorch};

// --- What is trained ---------------------------------------------------------

struct NetOptions {
  bool checkpoints = false;  // a region around a unit, and one inside another
  bool transparent = false;  // units are called directly
  bool frozen = false;       // the first unit
};

class Block : public torch::nn::Module {
 public:
  Block(FaultInjector* injector, bool checkpoints)
      : fc(register_module("fc", torch::nn::Linear(kDim, 2))),
        out(register_module("out", torch::nn::Linear(2, kDim))),
        injector_(injector),
        checkpoints_(checkpoints) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = [this](const at::Tensor& y) {
      return injector_->Pass("a unit's forward", fc->forward(y)).tanh();
    };
    const at::Tensor y = checkpoints_ ? Checkpoint(hidden, x) : hidden(x);
    return injector_->Pass("the end of a unit", x + out->forward(y));
  }

  torch::nn::Linear fc, out;

 private:
  FaultInjector* const injector_;
  const bool checkpoints_;
};

class Net : public torch::nn::Module {
 public:
  Net(FaultInjector* injector, const NetOptions& options)
      : first(
            register_module("first", std::make_shared<Block>(injector, false))),
        second(register_module(
            "second", std::make_shared<Block>(injector, options.checkpoints))),
        head(register_module("head", torch::nn::Linear(kDim, kDim))),
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
  torch::nn::Linear head;

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

at::Tensor LossOf(Trainer& trainer, int64_t part) {
  const Communicator& world = trainer.model->communicator();
  const at::Tensor x = Rows(part * world.world_size() + world.rank(), 1, kDim);
  const at::Tensor loss = Loss(trainer.model->forward(x), x);
  trainer.loss += loss.item<double>();
  trainer.graph = loss;
  return loss;
}

void Step(const NamedShard& named) {
  c10::NoGradGuard no_grad;
  at::Tensor shard = named.shard;
  if (shard.grad().defined()) shard.sub_(shard.grad(), 0.1);
}

void StepAndZeroGrad(Trainer& trainer) {
  for (const NamedShard& named : trainer.model->NamedShards()) Step(named);
  trainer.model->zero_grad();
}

// --- What is done with it ----------------------------------------------------

// Throws what goes wrong. `part` numbers the data.
using Iteration = void (*)(Trainer& trainer, int64_t part);

void Train(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->Backward(LossOf(trainer, part)));
  StepAndZeroGrad(trainer);
}

void TrainByPlainBackward(Trainer& trainer, int64_t part) {
  const at::Tensor loss = LossOf(trainer, part);
  trainer.injector->Pass("the user's own loss");
  loss.backward();
  StepAndZeroGrad(trainer);
}

void Accumulate(Trainer& trainer, int64_t part) {
  {
    const NoSyncScope no_sync = trainer.model->NoSync();
    ThrowIfError(trainer.model->Backward(LossOf(trainer, 2 * part)));
  }
  ThrowIfError(trainer.model->Backward(LossOf(trainer, 2 * part + 1)));
  StepAndZeroGrad(trainer);
}

void TrainGatheredAhead(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->RebuildFullParams().status());
  Train(trainer, part);
}

// The optimizer is called by the model.
void TrainInBackward(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->Backward(LossOf(trainer, part)));
  trainer.model->zero_grad();
}

void Negate(const at::Tensor& parameter) {
  c10::NoGradGuard no_grad;
  at::Tensor(parameter).neg_();
}

void EditInScope(Trainer& trainer, int64_t) {
  FullParamsScope scope = ValueOrThrow(trainer.model->SummonFullParams());
  for (const auto& item : trainer.model.module()->named_parameters()) {
    trainer.injector->Pass("a scope");
    Negate(item.value());
  }
  ThrowIfError(scope.Close());
}

void EditOnOneRank(Trainer& trainer, int64_t) {
  SummonOptions options;
  options.rank0_only = true;
  FullParamsScope scope =
      ValueOrThrow(trainer.model->SummonFullParams(options));
  if (trainer.model->communicator().rank() == 0) {
    for (const at::Tensor& p : trainer.model.module()->parameters()) Negate(p);
  }
  ThrowIfError(scope.Close());
}

void EditEach(Trainer& trainer, int64_t) {
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

void ClipAndSave(Trainer& trainer, int64_t part) {
  ThrowIfError(trainer.model->Backward(LossOf(trainer, part)));
  ThrowIfError(trainer.model->ClipGradNorm(1e-3).status());
  StepAndZeroGrad(trainer);
  const StateDict dict = ValueOrThrow(trainer.model->GatherStateDict());
  ThrowIfError(trainer.model->LoadStateDict(dict));
}

void Save(Trainer& trainer, int64_t) {
  ThrowIfError(trainer.model->GatherStateDict().status());
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
  bool frees_at_failure = true;  // and not at the next step
  bool tells_peers = true;       // when one rank fails
  // Some collectives are in no forward or backward: when they fail, they may
  // abort their group whatever the options say.
  bool outside_iteration = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

Options UnitsWith(ShardingStrategy strategy) {
  Options options;
  options.wrap_policy = WrapModules<Block>();
  options.unit.strategy = strategy;
  options.timeout = absl::Seconds(20);
  return options;
}

std::vector<Case> Cases() {
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

absl::Status AddHooks(Trainer& trainer, bool steps) {
  FaultInjector* injector = trainer.injector;
  if (steps) {
    return trainer.model->StepInBackward(
        [injector](absl::Span<const NamedShard> shards) -> absl::Status {
          FSDP_RETURN_IF_ERROR(injector->PassOrReturn("the step in backward"));
          for (NamedShard named : shards) {
            Step(named);
            named.shard.mutable_grad().reset();
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

absl::StatusOr<Trainer> MakeTrainer(const Case& c,
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

absl::StatusOr<Trainer> MakeTrainer(const Case& c, Communicator& world,
                                    FaultInjector* injector) {
  return MakeTrainer(c, std::make_shared<Net>(injector, c.net), world,
                     injector);
}

// --- What is expected of it --------------------------------------------------

// How an iteration has ended, and with which type of exception.
struct Outcome {
  absl::Status status;
  std::optional<FaultType> type;
};

Outcome Iterate(const Case& c, Trainer& trainer, int64_t part) {
  Outcome outcome;
  trainer.loss = 0;
  outcome.status = TorchToStatus("iteration", [&] {
    try {
      c.iterate(trainer, part);
    } catch (const StatusError&) {
      outcome.type = FaultType::kStatus;
      throw;
    } catch (const UsersError&) {
      outcome.type = FaultType::kUsers;
      throw;
    } catch (const c10::Error&) {
      outcome.type = FaultType::kTorch;
      throw;
    }
  });
  return outcome;
}

absl::Status Wrong(const std::string& text) {
  return absl::InternalError(text);
}

// The fault as it was injected, by its text and code, and by its type where
// nothing returns a Status on the way.
absl::Status CheckReported(const Outcome& outcome,
                           const FaultInjector& injector, FaultType type,
                           bool keeps_type) {
  constexpr absl::StatusCode kCodes[] = {absl::StatusCode::kDataLoss,
                                         absl::StatusCode::kUnknown,
                                         absl::StatusCode::kInternal};
  const absl::Status& status = outcome.status;
  if (!absl::StrContains(status.message(), injector.text())) {
    return Wrong(absl::StrCat("reported as ", status.ToString()));
  }
  if (status.code() != kCodes[static_cast<int>(type)]) {
    return Wrong(absl::StrCat("reported with code ", status.ToString()));
  }
  if (keeps_type && outcome.type != type) {
    return Wrong("the exception has changed its type");
  }
  return absl::OkStatus();
}

using Values = std::vector<at::Tensor>;

Values ShardsOf(const Trainer& trainer) {
  Values values;
  for (const NamedShard& named : trainer.model->NamedShards()) {
    values.push_back(named.shard.detach().clone());
  }
  return values;
}

void SetShards(Trainer& trainer, const Values& values) {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < values.size(); ++i) {
    at::Tensor shard = trainer.model->NamedShards()[i].shard;
    shard.copy_(values[i]);
  }
}

// Each parameter has one of these values, and not something in between.
absl::Status CheckNotTorn(const Trainer& trainer,
                          const std::vector<Values>& choices) {
  for (size_t i = 0; i < choices.front().size(); ++i) {
    const NamedShard& named = trainer.model->NamedShards()[i];
    if (std::none_of(choices.begin(), choices.end(), [&](const Values& values) {
          return at::equal(named.shard, values[i]);
        })) {
      return Wrong(absl::StrCat(named.name, " is torn"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNothingGathered(const Trainer& trainer) {
  const MemoryStats stats = trainer.model->memory_stats();
  if (stats.parameters.in_use_bytes != 0) {
    return Wrong("unsharded memory is left");
  }
  if (stats.gradients.in_use_bytes != 0) return Wrong("a gradient is left");
  for (const at::Tensor& parameter : trainer.model.module()->parameters()) {
    const absl::Status read =
        TorchToStatus("read", [&] { parameter.detach().sum(); });
    if (!absl::StrContains(read.message(), "the parameters of unit ")) {
      return Wrong(
          absl::StrCat("reading a freed parameter: ", read.ToString()));
    }
    if (parameter.requires_grad() &&
        !absl::StartsWith(parameter.grad_fn()->name(), "fsdp::Sharded")) {
      return Wrong("a parameter still belongs to a graph");
    }
  }
  return absl::OkStatus();
}

// Both have done the same iteration.
absl::Status CheckSame(const Trainer& trainer, const Trainer& reference) {
  if (trainer.loss != reference.loss) {
    return Wrong(absl::StrCat("loss ", trainer.loss, ", not ", reference.loss));
  }
  return CheckNotTorn(trainer, {ShardsOf(reference)});
}

bool IsNamedAbort(const absl::Status& status, const FaultInjector& injector) {
  return absl::IsAborted(status) &&
         absl::StrContains(status.message(), injector.text());
}

// --- All ranks fail alike, and go on -----------------------------------------

// Returns whether the iteration has come to the fault.
absl::StatusOr<bool> CheckOneFault(const Case& c, Trainer& trainer,
                                   Trainer& reference, int64_t point,
                                   FaultType type) {
  FaultInjector& injector = *trainer.injector;
  const Values before = ShardsOf(trainer);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, point).status);
  injector.Arm(point, type);
  const Outcome outcome = Iterate(c, trainer, point);
  injector.Disarm();
  if (injector.failed_at().empty()) {
    FSDP_RETURN_IF_ERROR(outcome.status);
    FSDP_RETURN_IF_ERROR(CheckSame(trainer, reference));
    return false;
  }
  const bool in_user_code =
      c.iterate == &TrainByPlainBackward || !injector.failed_in_backward();
  const bool keeps_type = in_user_code && c.iterate != &EditEach &&
                          injector.failed_at() != FaultInjector::kAllocation;
  FSDP_RETURN_IF_ERROR(CheckReported(outcome, injector, type, keeps_type));
  // Whole gradients of backwards before outlive a failure.
  trainer.model->zero_grad();
  if (c.frees_at_failure) FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
  FSDP_RETURN_IF_ERROR(
      CheckNotTorn(trainer, {before, c.edits ? ShardsOf(reference) : before}));
  // Nothing is left of the values that the iteration has worked with.
  for (const at::Tensor& values : before) values.mul_(0.75);
  SetShards(trainer, before);
  SetShards(reference, before);
  const absl::Status next = Iterate(c, trainer, point).status;
  if (c.outside_iteration && IsNamedAbort(next, injector)) return true;
  FSDP_RETURN_IF_ERROR(next);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, point).status);
  FSDP_RETURN_IF_ERROR(CheckSame(trainer, reference));
  FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
  return true;
}

// Returns whether any rank has come to the fault.
absl::StatusOr<bool> CheckFaults(const Case& c, Communicator& world,
                                 FaultInjector* injector, int64_t first_point,
                                 FaultType type) {
  FaultInjector never;
  FSDP_ASSIGN_OR_RETURN(Trainer trainer, MakeTrainer(c, world, injector));
  FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
  for (int64_t point = first_point;; ++point) {
    const absl::StatusOr<bool> failed =
        CheckOneFault(c, trainer, reference, point, type);
    if (!failed.ok()) {
      return Annotate(failed.status(), absl::StrCat("point ", point, ", ",
                                                    injector->failed_at()));
    }
    if (!*failed || c.outside_iteration) return *failed;
  }
}

// A new group whose ranks have injectors.
class Group {
 public:
  Group(int world, bool aborts) : injectors_(world) {
    comm::LocalGroupOptions options;
    options.timeout = absl::Seconds(20);
    auto communicators = ValueOrThrow(comm::CreateLocalGroup(world, options));
    for (int rank = 0; rank < world; ++rank) {
      communicators_.push_back(InjectFaults(std::move(communicators[rank]),
                                            &injectors_[rank], aborts));
    }
  }

  FaultInjector* injector(int rank) { return &injectors_[rank]; }
  // Whether any rank has failed as it was told.
  bool has_failed() const {
    return std::any_of(
        injectors_.begin(), injectors_.end(),
        [](const FaultInjector& i) { return !i.failed_at().empty(); });
  }

  absl::Status Run(const std::function<absl::Status(Communicator&)>& run) {
    return AllOk(RunRanks(communicators_, run));
  }

 private:
  std::vector<FaultInjector> injectors_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

class FaultInjectionTest : public ::testing::TestWithParam<Case> {};

TEST_P(FaultInjectionTest, RanksThatFailAlikeGoOnAsIfTheyNeverHad) {
  Case c = GetParam();
  c.options.abort_on_failure = false;
  for (const FaultType type : kFaultTypes) {
    SCOPED_TRACE(type);
    bool goes_on = true;
    for (int64_t point = 0; goes_on; ++point) {
      Group group(c.world, /*aborts=*/false);
      goes_on = false;
      ASSERT_OK(group.Run([&](Communicator& world) {
        return CheckFaults(c, world, group.injector(world.rank()), point, type)
            .status();
      }));
      goes_on = c.outside_iteration && group.has_failed();
    }
  }
}

// --- One rank fails ----------------------------------------------------------

// A point in user code that the model does not see: it concerns its rank only.
bool ConcernsOneRank(const std::string& point) { return point == "a scope"; }

// What each rank has done twice.
struct Outcomes {
  absl::Status first;
  absl::Status second;
};

// Waits until all ranks have called it, so that none is told of a failure by
// the end of another.
class EndOfAll {
 public:
  explicit EndOfAll(int world) : running_(world) {}

  absl::Status Reach() {
    absl::MutexLock lock(&mutex_);
    --running_;
    const auto all = [this]() { return running_ == 0; };
    return mutex_.AwaitWithTimeout(absl::Condition(&all), absl::Seconds(30))
               ? absl::OkStatus()
               : Wrong("a peer has not ended");
  }

 private:
  absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_);
};

absl::Status CheckNamed(const absl::Status& status, int faulty_rank) {
  if (status.ok()) return status;
  if (!absl::IsDeadlineExceeded(status) &&
      (absl::StrContains(status.message(), "injected at ") ||
       absl::StrContains(status.message(),
                         absl::StrCat("rank ", faulty_rank)))) {
    return absl::OkStatus();
  }
  return Wrong(absl::StrCat("a peer ended with ", status.ToString()));
}

absl::Status FailOnOneRank(const Case& c, Communicator& world,
                           FaultInjector* injector,
                           const std::function<void()>& arm, int faulty,
                           FaultType type, EndOfAll* end, Outcomes* outcomes) {
  FaultInjector never;
  FSDP_ASSIGN_OR_RETURN(Trainer trainer, MakeTrainer(c, world, injector));
  FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
  const Values before = ShardsOf(trainer);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, 0).status);
  const Values once = ShardsOf(reference);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, 1).status);
  const Values twice = ShardsOf(reference);

  arm();
  const Outcome outcome = Iterate(c, trainer, 0);
  injector->Disarm();
  outcomes->first = outcome.status;
  if (!outcome.status.ok()) {
    const bool fails_here = !injector->failed_at().empty();
    if (fails_here) {
      FSDP_RETURN_IF_ERROR(
          CheckReported(outcome, *injector, type, /*keeps_type=*/false));
    }
    trainer.model->zero_grad();
    if (fails_here && c.frees_at_failure) {
      FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
    }
    FSDP_RETURN_IF_ERROR(
        CheckNotTorn(trainer, {before, c.edits ? once : before}));
  }
  outcomes->second = Iterate(c, trainer, 1).status;
  FSDP_RETURN_IF_ERROR(end->Reach());
  FSDP_RETURN_IF_ERROR(CheckNamed(outcomes->first, faulty));
  FSDP_RETURN_IF_ERROR(CheckNamed(outcomes->second, faulty));
  return outcomes->second.ok() ? absl::OkStatus()
                               : CheckNotTorn(trainer, {before, once, twice});
}

void ExpectAllRanksEnd(const Case& c, FaultType type, absl::string_view part) {
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    Group group(c.world, /*aborts=*/c.outside_iteration);
    EndOfAll end(c.world);
    std::vector<Outcomes> outcomes(c.world);
    const int faulty = static_cast<int>(point) % c.world;
    const absl::Status status = group.Run([&](Communicator& world) {
      const int rank = world.rank();
      const auto arm = [&, rank] {
        if (rank == faulty) group.injector(rank)->Arm(point, type, part);
      };
      return FailOnOneRank(c, world, group.injector(rank), arm, faulty, type,
                           &end, &outcomes[rank]);
    });
    const std::string& failed_at = group.injector(faulty)->failed_at();
    SCOPED_TRACE(absl::StrCat("point ", point, ", ", failed_at));
    ASSERT_OK(status);
    goes_on = !failed_at.empty();
    if (!goes_on) continue;
    EXPECT_FALSE(outcomes[faulty].first.ok());
    for (const Outcomes& of_rank : outcomes) {
      // All ranks go on, or none.
      EXPECT_EQ(of_rank.second.ok(), outcomes[faulty].second.ok());
      if (ConcernsOneRank(failed_at)) {
        EXPECT_OK(of_rank.second);
      } else {
        EXPECT_FALSE(of_rank.first.ok() && of_rank.second.ok());
      }
    }
  }
}

class OneRankFaultTest : public FaultInjectionTest {};

TEST_P(OneRankFaultTest, ARankThatFailsAloneEndsItsPeersWithItsName) {
  const Case& c = GetParam();
  for (const FaultType type : {FaultType::kStatus, FaultType::kUsers}) {
    SCOPED_TRACE(type);
    if (!c.outside_iteration) {
      ExpectAllRanksEnd(c, type, /*part=*/"");
      continue;
    }
    // Agreements between steps use the group of all ranks, and nothing tells
    // the others when that fails on one rank only.
    ExpectAllRanksEnd(c, type, /*part=*/" of first");
    Case one_group = c;
    one_group.replicas = 1;
    one_group.options.unit.strategy = ShardingStrategy::kFullShard;
    ExpectAllRanksEnd(one_group, type, /*part=*/"");
  }
}

// --- Sharding fails ----------------------------------------------------------

class FaultInShardingTest : public FaultInjectionTest {};

// With the same modules, unless some units are sharded already, and with a new
// group: the first may be aborted.
TEST_P(FaultInShardingTest, RanksThatFailAlikeMayTryAgain) {
  const Case& c = GetParam();
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    Group first(c.world, /*aborts=*/false);
    std::vector<std::shared_ptr<Net>> nets(c.world);
    ASSERT_OK(first.Run([&](Communicator& world) -> absl::Status {
      FaultInjector* injector = first.injector(world.rank());
      std::shared_ptr<Net>& net = nets[world.rank()];
      net = std::make_shared<Net>(injector, c.net);
      injector->Arm(point, FaultType::kStatus);
      const absl::Status status = MakeTrainer(c, net, world, injector).status();
      injector->Disarm();
      if (injector->failed_at().empty()) return status;
      return CheckReported({status, std::nullopt}, *injector,
                           FaultType::kStatus, /*keeps_type=*/false);
    }));
    SCOPED_TRACE(
        absl::StrCat("point ", point, ", ", first.injector(0)->failed_at()));
    goes_on = first.has_failed();
    if (!goes_on) continue;
    Group second(c.world, /*aborts=*/false);
    ASSERT_OK(second.Run([&](Communicator& world) -> absl::Status {
      FaultInjector never;
      absl::StatusOr<Trainer> trainer =
          MakeTrainer(c, nets[world.rank()], world, &never);
      if (absl::IsFailedPrecondition(trainer.status()) &&
          absl::StrContains(trainer.status().message(), "make a new one")) {
        trainer = MakeTrainer(c, world, &never);
      }
      FSDP_RETURN_IF_ERROR(trainer.status());
      FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
      FSDP_RETURN_IF_ERROR(Iterate(c, *trainer, 0).status);
      FSDP_RETURN_IF_ERROR(Iterate(c, reference, 0).status);
      return CheckSame(*trainer, reference);
    }));
  }
}

TEST_P(FaultInShardingTest, ARankThatFailsAloneEndsItsPeers) {
  const Case& c = GetParam();
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    const int faulty = static_cast<int>(point) % c.world;
    Group group(c.world, /*aborts=*/true);
    EndOfAll end(c.world);
    std::vector<absl::Status> statuses(c.world);
    EXPECT_OK(group.Run([&](Communicator& world) -> absl::Status {
      const int rank = world.rank();
      FaultInjector* injector = group.injector(rank);
      if (rank == faulty) injector->Arm(point, FaultType::kStatus);
      const absl::StatusOr<Trainer> trainer = MakeTrainer(c, world, injector);
      statuses[rank] = trainer.status();
      injector->Disarm();
      return end.Reach();
    }));
    const std::string& failed_at = group.injector(faulty)->failed_at();
    SCOPED_TRACE(absl::StrCat("point ", point, ", ", failed_at));
    goes_on = !failed_at.empty();
    for (const absl::Status& status : statuses) {
      EXPECT_OK(CheckNamed(status, faulty));
    }
    EXPECT_NE(statuses[faulty].ok(), goes_on);
  }
}

std::vector<Case> CasesThatTellPeers() {
  std::vector<Case> cases = Cases();
  cases.erase(std::remove_if(cases.begin(), cases.end(),
                             [](const Case& c) { return !c.tells_peers; }),
              cases.end());
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, OneRankFaultTest,
                         ::testing::ValuesIn(CasesThatTellPeers()),
                         [](const auto& info) { return info.param.name; });

std::vector<Case> ShardingCases() {
  std::vector<Case> cases;
  for (Case& c : Cases()) {
    if (c.name == "FullShard" || c.name == "BackwardGroups" ||
        c.name == "HybridShard") {
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, FaultInShardingTest,
                         ::testing::ValuesIn(ShardingCases()),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(All, FaultInjectionTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp
