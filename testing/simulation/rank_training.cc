#include "testing/simulation/rank_training.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/mesh.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/forward.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/toy_model.h"
#include "offload/file_store.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {
namespace {

// --- A small model that takes simulated time to compute

void Compute(absl::string_view what) { Simulation::Current()->Event(what); }

at::Tensor Computed(const at::Tensor& tensor) {
  if (tensor.requires_grad()) {
    tensor.register_hook([](const at::Tensor& gradient) {
      Compute("computes a gradient");
      return gradient;
    });
  }
  return tensor;
}

// Computes x + out(tanh(fc(x))). A rank that computes it lets others run in
// between, in forward and backward.
class SimulatedBlockImpl : public torch::nn::Module {
 public:
  explicit SimulatedBlockImpl(int64_t dim)
      : fc(register_module("fc", torch::nn::Linear(dim, 2 * dim))),
        out(register_module("out", torch::nn::Linear(2 * dim, dim))) {}

  at::Tensor forward(const at::Tensor& x) {
    Compute("computes a block");
    const at::Tensor inner = Computed(at::tanh(fsdp::Forward(*fc, x)));
    Compute("computes the rest of it");
    return x + fsdp::Forward(*out, inner);
  }

  torch::nn::Linear fc;
  torch::nn::Linear out;
};

// Computes head(blocks(embed(x))).
class SimulatedNetImpl : public torch::nn::Module {
 public:
  SimulatedNetImpl(int64_t dim, int num_blocks)
      : embed(register_module("embed", torch::nn::Linear(dim, dim))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module("head", torch::nn::Linear(dim, dim))) {
    for (int i = 0; i < num_blocks; ++i) {
      blocks->push_back(std::make_shared<SimulatedBlockImpl>(dim));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = Computed(fsdp::Forward(*embed, x));
    for (const std::shared_ptr<torch::nn::Module>& block : *blocks) {
      y = Computed(fsdp::Forward(*block->as<SimulatedBlockImpl>(), y));
    }
    if (!failure_.empty()) throw std::runtime_error(failure_);
    Compute("computes the head");
    return fsdp::Forward(*head, y);
  }

  // Makes the next forward throw std::runtime_error(`text`) half-way.
  void FailNext(std::string text) { failure_ = std::move(text); }

  torch::nn::Linear embed;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;

 private:
  std::string failure_;
};

// --- Its training

using checkpoint::Checkpointer;
using checkpoint::CheckpointerOptions;
using checkpoint::TrainingRun;
using offload::ParamStore;

constexpr char kRoot[] = "/run";

absl::Status Different(absl::string_view text) {
  return absl::InternalError(absl::StrCat(kDiffers, text));
}

WrapPolicy PolicyOf(Wrap wrap) {
  switch (wrap) {
    case Wrap::kBlocks:
      return WrapModules<SimulatedBlockImpl>();
    case Wrap::kLinears:
      return WrapModules<SimulatedBlockImpl, torch::nn::LinearImpl>();
    default:
      return nullptr;
  }
}

class RankRun {
 public:
  RankRun(const RankWorld& world, RankReport* report)
      : world_(world),
        t_(world.scenario->training),
        comm_(*world.communicator),
        report_(*report) {}

  absl::Status Run() {
    FSDP_RETURN_IF_ERROR(Create());
    int64_t start = -1;
    if (checkpoints_ != nullptr) {
      TrainingRun run = AsRun();
      FSDP_ASSIGN_OR_RETURN(report_.loaded, checkpoints_->LoadLatest(run));
      start = report_.loaded.value_or(-1);
    }
    expected_ = &world_.expected(start);
    if (start >= 0) FSDP_RETURN_IF_ERROR(Compare(start, "what is loaded"));
    if (t_.is_guarded) return RunGuarded(std::max<int64_t>(start, 0));
    for (int64_t step = std::max<int64_t>(start, 0); step < t_.steps; ++step) {
      FSDP_RETURN_IF_ERROR(Step(static_cast<int>(step)));
      FSDP_RETURN_IF_ERROR(MaybeSave(step + 1));
    }
    FSDP_RETURN_IF_ERROR(AwaitSave());
    return Compare(t_.steps, "the result");
  }

 private:
  absl::Status Create() {
    std::vector<comm::MeshDimension> dimensions = {{"shard", -1}};
    if (t_.mesh_rows > 1)
      dimensions = {{"replicate", t_.mesh_rows}, {"shard", -1}};
    FSDP_ASSIGN_OR_RETURN(
        const comm::Mesh mesh,
        comm::Mesh::Create(fsdp::testing::Unowned(comm_), dimensions));
    const auto net = std::make_shared<SimulatedNetImpl>(t_.dim, t_.blocks);
    fsdp::testing::FillParameters(*net, /*seed=*/3);
    FSDP_ASSIGN_OR_RETURN(model_, FullyShard(net, mesh, OptionsOf()));
    optimizer_ = MakeOptimizer(t_, model_->Parameters());
    if (t_.save_every == 0) return absl::OkStatus();
    CheckpointerOptions options;
    options.files = world_.disk;
    options.timeout = absl::Seconds(20);
    options.overwrite = true;
    if (t_.keep_last > 0) options.keep_last = t_.keep_last;
    if (t_.small_staging) options.staging_bytes = 256;
    FSDP_ASSIGN_OR_RETURN(
        checkpoints_,
        Checkpointer::Open(kRoot, fsdp::testing::Unowned(comm_), options));
    return absl::OkStatus();
  }

  Options OptionsOf() const {
    Options options;
    options.wrap_policy = PolicyOf(t_.wrap);
    options.unit.strategy = t_.strategy;
    if (t_.bfloat16) options.unit.precision = ComputeIn(at::kBFloat16);
    options.prefetch = t_.prefetch;
    options.reshard_root_after_forward = t_.reshard_root;
    options.share_memory = t_.share_memory;
    options.checks.order = t_.check_order;
    if (t_.divide > 0) options.gradients.divide_factor = t_.divide;
    const auto tier = [this](bool rests) {
      return rests ? Tier::kSsd : t_.cpu_tier ? Tier::kCpu : Tier::kDevice;
    };
    OffloadOptions& offload = options.offload;
    offload.parameters = tier(t_.rest_parameters);
    offload.gradients = tier(t_.rest_gradients);
    offload.optimizer = tier(t_.rest_states);
    offload.optimizer_state = t_.optimizer == Optimizer::kSgd ? 1 : 2;
    offload.rollback = t_.rollback;
    offload.prefetch_distance = t_.prefetch_distance;
    offload.block_bytes = 4096;
    if (t_.buffer_pages > 0) {
      offload.buffer_bytes = t_.buffer_pages * offload::kPageBytes;
    }
    offload.make_store = [this](RestingKind kind, int64_t capacity) {
      const bool in_memory =
          (t_.memory_kinds >> static_cast<unsigned>(kind) & 1U) != 0;
      return in_memory ? MakeMemory(capacity) : MakeFile(capacity);
    };
    return options;
  }

  absl::StatusOr<std::unique_ptr<ParamStore>> MakeMemory(
      int64_t capacity) const {
    absl::StatusOr<std::unique_ptr<ParamStore>> memory =
        offload::testing::RollingHostStore(capacity);
    if (!t_.rollback) memory = offload::HostStore::Make(capacity);
    FSDP_RETURN_IF_ERROR(memory.status());
    return MutateMemory(*std::move(memory), world_.mutant);
  }

  absl::StatusOr<std::unique_ptr<ParamStore>> MakeFile(int64_t capacity) const {
    offload::FileStoreOptions file;
    file.directory = "/ssd";
    file.capacity = capacity;
    file.block_bytes = 4096;
    file.queue_depth = 4;
    file.queue = offload::QueueKind::kThreads;
    file.rollback = t_.rollback;
    file.system = world_.ssd;
    return offload::FileStore::Make(file);
  }

  TrainingRun AsRun() {
    TrainingRun run;
    run.model = model_.get();
    run.optimizer = optimizer_.get();
    run.random_state = false;  // threads have one generator together
    return run;
  }

  absl::Status RunGuarded(int64_t start) {
    TrainingRun run = AsRun();
    checkpoint::RunGuardOptions options;
    options.save_every = t_.save_every;
    options.save_async = t_.save_async;
    options.signal = world_.signal;
    options.before_save = [this](int64_t step) {
      world_.save_begins(step);
      return true;
    };
    checkpoint::RunGuard guard(fsdp::testing::Unowned(comm_),
                               checkpoints_.get(), &run, options);
    guard_ = &guard;
    for (int64_t step = start; step < t_.steps; ++step) {
      FSDP_RETURN_IF_ERROR(Step(static_cast<int>(step)));
      const bool is_last = step + 1 == t_.steps;
      const absl::Status ended = guard.EndStep(step + 1, is_last);
      const bool has_saved = ended.ok() ? is_last : absl::IsCancelled(ended);
      if (has_saved && checkpoints_ != nullptr) report_.saved = step + 1;
      FSDP_RETURN_IF_ERROR(ended);
      if (world_.last_step == step + 1 && !is_last) return absl::OkStatus();
    }
    return Compare(t_.steps, "the result");
  }

  absl::Status Step(int step) {
    optimizer_->zero_grad();
    double last_loss = 0;
    for (int i = 0; i < t_.backwards; ++i) {
      std::optional<NoSyncScope> no_sync;
      if (t_.no_sync && i + 1 < t_.backwards) no_sync.emplace(model_->NoSync());
      const at::Tensor x =
          DataOf(t_, step, i, comm_.rank(), comm_.world_size());
      MaybeThrow();
      const at::Tensor loss =
          fsdp::testing::Loss(model_->forward(x).to(at::kFloat), x) /
          t_.backwards;
      const auto got = loss.item<float>();
      const float wanted = expected_->Loss(step, i, comm_.rank());
      if (!(got == wanted)) {
        return Different(absl::StrCat("the loss of step ", step, ", backward ",
                                      i, " is ", got, ", not ", wanted));
      }
      FSDP_RETURN_IF_ERROR(model_->Backward(loss));
      last_loss = got;
    }
    if (guard_ != nullptr) {
      if (world_.not_finite_step == step + 1) last_loss = std::nan("");
      FSDP_ASSIGN_OR_RETURN(const bool may_step,
                            guard_->MayStep(step + 1, last_loss));
      if (!may_step) return Different("a step was left out");
    }
    Simulation::Current()->Event("steps");
    optimizer_->step();
    return absl::OkStatus();
  }

  void MaybeThrow() {
    if (world_.throws_at != forwards_++) return;
    report_.thrown_at = Simulation::Current()->elapsed_nanos();
    // The library sees the first of these, and not the second.
    if (t_.dim % 2 == 1)
      return model_.module()->FailNext(std::string(kUsersError));
    throw std::runtime_error(std::string(kUsersError));
  }

  absl::Status MaybeSave(int64_t step) {
    if (checkpoints_ == nullptr || step % t_.save_every != 0) {
      return absl::OkStatus();
    }
    // Also awaits the save before.
    FSDP_RETURN_IF_ERROR(AwaitSave());
    world_.save_begins(step);
    if (t_.save_async) {
      FSDP_RETURN_IF_ERROR(checkpoints_->SaveAsync(step, AsRun()));
      saving_ = step;
      return absl::OkStatus();
    }
    FSDP_RETURN_IF_ERROR(checkpoints_->Save(step, AsRun()));
    report_.saved = step;
    return absl::OkStatus();
  }

  absl::Status AwaitSave() {
    if (!saving_.has_value()) return absl::OkStatus();
    FSDP_RETURN_IF_ERROR(checkpoints_->Wait());
    report_.saved = std::exchange(saving_, std::nullopt);
    return absl::OkStatus();
  }

  absl::Status Compare(int64_t step, absl::string_view what) {
    FSDP_ASSIGN_OR_RETURN(const StateDict dict, model_->GatherStateDict());
    Values values;
    for (const auto& item : dict) values[item.key()] = item.value();
    const std::string difference =
        FirstDifference(values, expected_->ValuesAfter(step));
    if (difference.empty()) return absl::OkStatus();
    return Different(absl::StrCat(what, " of step ", step, ": ", difference));
  }

  const RankWorld& world_;
  const Training& t_;
  comm::Communicator& comm_;
  RankReport& report_;
  FullyShardedDataParallel<SimulatedNetImpl> model_{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<Checkpointer> checkpoints_;
  PlainTraining* expected_ = nullptr;
  int64_t forwards_ = 0;
  std::optional<int64_t> saving_;
  checkpoint::RunGuard* guard_ = nullptr;  // null if the run has none
};

}  // namespace

absl::Status TrainRank(const RankWorld& world, RankReport* report) {
  return RankRun(world, report).Run();
}

}  // namespace fsdp::simulation
