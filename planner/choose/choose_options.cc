#include "planner/choose/choose_options.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/plain_bytes.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/setup/shard_plan.h"
#include "planner/choose/planned_model.h"
#include "planner/choose/step_profile.h"
#include "planner/simulator/simulator.h"

namespace fsdp {
namespace {

// --- What is asked for ------------------------------------------------------

absl::Status Check(const AutoOptions& options) {
  if (options.memory_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("AutoOptions::memory_bytes is ", options.memory_bytes,
                     ": say how much memory a rank may use"));
  }
  if (options.rows <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("AutoOptions::rows is ", options.rows,
                     ": a rank's batch has at least one"));
  }
  if (options.loss == nullptr) {
    return absl::InvalidArgumentError(
        "AutoOptions::loss is empty: without a forward nobody knows what a "
        "step computes and keeps");
  }
  if (options.host_bytes < 0 || options.memory.backwards_per_step < 1 ||
      !(options.memory.optimizer_state >= 0 &&
        options.memory.optimizer_state <= simulator::kMostState)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "AutoOptions with ", options.host_bytes, " bytes of the host, ",
        options.memory.backwards_per_step, " backwards per step and ",
        options.memory.optimizer_state,
        " bytes of optimizer state per byte: at least 0, 1 and 0, and at most "
        "1e6 of these"));
  }
  if (options.costs.has_value()) {
    FSDP_RETURN_IF_ERROR(options.costs->Validate());
  }
  const Options& base = options.base;
  const struct {
    bool is_set;
    const char* option;
    const char* why;
  } chosen_here[] = {
      {base.configure_unit != nullptr, "configure_unit",
       "which has the last word on what is chosen here"},
      {base.unit.backward_group_size.has_value(), "unit.backward_group_size",
       "which goes with one strategy only"},
      {base.quantize.any(), "quantize", "whose costs nobody knows here"},
      {base.offload.any() || base.offload.memory_budget.has_value(),
       "offload's tiers or its memory_budget", "which are chosen here"},
      {base.offload.keep, "offload.keep",
       "which needs all to rest in files, without choice"}};
  for (const auto& [is_set, option, why] : chosen_here) {
    if (!is_set) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "AutoOptions::base.", option, " is set, ", why, ": leave it unset"));
  }
  return absl::OkStatus();
}

bool UsesFiles(const Options& base) {
  return !base.offload.directory.empty() || base.offload.make_store != nullptr;
}

std::string TextOf(const AutoOptions& options) {
  return absl::StrCat(
      "memory ", options.memory_bytes, ", rows ", options.rows,
      ", optimizer state ", options.memory.optimizer_state, ", backwards ",
      options.memory.backwards_per_step, ", host ", options.host_bytes,
      ", recompute ", options.may_recompute, ", files ",
      UsesFiles(options.base), ", costs ",
      options.costs.has_value() ? ToText(*options.costs) : "", "\n");
}

std::vector<ShardingStrategy> StrategiesOn(const comm::Mesh& mesh) {
  if (mesh.world()->world_size() == 1) return {ShardingStrategy::kFullShard};
  std::vector<ShardingStrategy> strategies = {
      ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
      ShardingStrategy::kShardOptimizer, ShardingStrategy::kNoShard};
  if (mesh.num_dimensions() == 2) {
    strategies.push_back(ShardingStrategy::kHybridShard);
    strategies.push_back(ShardingStrategy::kHybridShardGradOp);
  }
  return strategies;
}

// --- What a step takes ------------------------------------------------------

// Returns rank 0's profile on all ranks, whose program is the same, and so are
// the bytes of its numbers.
absl::StatusOr<StepProfile> OfRank0(comm::Communicator& world,
                                    const StepProfile& own,
                                    absl::Time deadline) {
  std::string bytes;
  AppendValue(bytes, own.backward_seconds);
  AppendList(bytes, absl::MakeConstSpan(own.forward));
  FSDP_ASSIGN_OR_RETURN(bytes,
                        comm::BroadcastString(world, bytes, /*root=*/0,
                                              "what a step takes", deadline));
  BytesReader reader(bytes);
  StepProfile profile;
  profile.backward_seconds = reader.Take<double>();
  profile.forward = reader.TakeList<ModuleVisit>();
  FSDP_CHECK(reader.ok());
  return profile;
}

// Assumes that no transfer runs beside compute. Parameters come for forward and
// backward, gradients go and come, and so does all that the optimizer steps.
double TransferSeconds(const OffloadPlan& plan, Tier tier, int backwards,
                       const StepCosts& costs) {
  const auto away = [&](RestingKind kind) {
    const OffloadPlan::Bytes& bytes = plan.of(kind);
    return static_cast<double>(tier == Tier::kSsd ? bytes.ssd : bytes.cpu);
  };
  const double bytes = (2.0 * backwards + 2) * away(RestingKind::kParameters) +
                       2.0 * backwards * away(RestingKind::kGradients) +
                       2 * away(RestingKind::kOptimizer);
  return bytes /
         (tier == Tier::kSsd ? costs.ssd_bandwidth : costs.host_bandwidth);
}

// --- The choice -------------------------------------------------------------

// Estimates combinations on this rank alone.
class Search {
 public:
  Search(const AutoOptions& options, const comm::Mesh& mesh,
         const StepProfile& profile, const StepCosts& costs)
      : options_(options), mesh_(mesh), profile_(profile), costs_(costs) {}

  absl::StatusOr<AutoChoice> Choose(std::vector<Division>& divisions) && {
    for (Division& division : divisions) {
      std::vector<Tier> tiers = {Tier::kDevice};
      const bool on_cpu =
          division.plan.tree.parameters.front().front().is_cpu();
      if (!on_cpu && options_.host_bytes > 0) tiers.push_back(Tier::kCpu);
      if (UsesFiles(options_.base)) tiers.push_back(Tier::kSsd);
      const bool may_recompute =
          options_.may_recompute && division.recompute != nullptr &&
          (!options_.base.transparent || options_.base.recompute.units);
      Options options = options_.base;
      options.wrap_policy = division.wrap_policy;
      for (const Tier tier : tiers) {
        OffloadOptions& offload = options.offload;
        offload.parameters = offload.gradients = offload.optimizer = tier;
        if (tier != Tier::kDevice) {
          offload.optimizer_state = options_.memory.optimizer_state;
        }
        for (const bool recompute : {false, true}) {
          if (recompute && !may_recompute) continue;
          options.recompute.units = recompute ? division.recompute : nullptr;
          for (const ShardingStrategy strategy : StrategiesOn(mesh_)) {
            options.unit.strategy = strategy;
            for (PlannedUnit& unit : division.plan.units) {
              unit.options.strategy = strategy;
            }
            for (const bool prefetch : {true, false}) {
              options.prefetch = {prefetch, prefetch};
              FSDP_RETURN_IF_ERROR(Consider(division, options));
            }
          }
        }
      }
    }
    FSDP_ASSIGN_OR_RETURN(const int chosen,
                          ChooseCandidate(candidates_, options_.memory_bytes));
    AutoChoice choice;
    choice.options = choices_[chosen];
    choice.plan = candidates_[chosen].plan;
    choice.activations = candidates_[chosen].activations;
    choice.considered = std::move(candidates_);
    choice.chosen = chosen;
    choice.memory_bytes = options_.memory_bytes;
    return choice;
  }

 private:
  // Takes all tiers to be the same: where what has no room on the device rests.
  absl::Status Consider(const Division& division, Options options) {
    const Tier tier = options.offload.optimizer;
    Candidate candidate;
    candidate.units = division.name();
    candidate.strategy = ToString(options.unit.strategy);
    candidate.prefetch = options.prefetch.forward;
    candidate.recompute = options.recompute.units != nullptr;
    candidate.rests = tier == Tier::kDevice ? "memory" : ToString(tier);
    UnitMembership membership = division.membership;
    if (candidate.recompute) {
      membership.recomputed = division.may_be_recomputed;
    }
    FSDP_ASSIGN_OR_RETURN(PlannedModel planned,
                          PlanModel(division.plan, mesh_, options));
    candidate.activations =
        ActivationBytes(profile_, membership, planned.gradients);
    if (tier != Tier::kDevice) {
      const absl::Status fitted =
          FitIntoBudget(division, candidate.activations, options, planned);
      candidate.refused = std::string(fitted.message());
      // A candidate without tiers says the same.
      if (fitted.ok() && !planned.offload->leaves_device()) {
        return absl::OkStatus();
      }
    }
    candidate.plan = planned.PlanMemory(options_.memory);
    if (candidate.refused.empty()) {
      FSDP_RETURN_IF_ERROR(Simulate(tier, membership, planned, candidate));
    }
    candidates_.push_back(std::move(candidate));
    choices_.push_back(std::move(options));
    return absl::OkStatus();
  }

  // Lets as much rest on the device as has room beside what computes.
  absl::Status FitIntoBudget(const Division& division, int64_t activations,
                             Options& options, PlannedModel& planned) const {
    const MemoryPlan away = planned.PlanMemory(options_.memory);
    const int64_t computing =
        activations + away.copies + away.gathered + away.parts + away.in_flight;
    if (computing >= options_.memory_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("what computes alone lacks ",
                       (computing - options_.memory_bytes) >> 20, " MiB"));
    }
    int64_t room = options_.memory_bytes - computing;
    // What stays may need memory besides, as its gradients do on their way.
    for (int64_t lacks = room; lacks > 0;) {
      options.offload.memory_budget = room;
      absl::StatusOr<PlannedModel> fitted =
          PlanModel(division.plan, mesh_, options);
      if (!fitted.ok())
        return absl::ResourceExhaustedError("no room to transfer");
      planned = *std::move(fitted);
      lacks = planned.PlanMemory(options_.memory).total() + activations -
              options_.memory_bytes;
      const int64_t used =
          planned.offload->device_bytes() + planned.offload->transfer_bytes;
      room = std::min(room, used) - lacks;
    }
    const OffloadPlan& plan = *planned.offload;
    int64_t on_host = 0;
    for (const OffloadPlan::Bytes& bytes : plan.bytes) on_host += bytes.cpu;
    if (on_host <= options_.host_bytes) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        "the host lacks ", (on_host - options_.host_bytes) >> 20, " MiB"));
  }

  absl::Status Simulate(Tier tier, const UnitMembership& membership,
                        PlannedModel& planned, Candidate& candidate) const {
    const int ranks = mesh_.world()->world_size();
    simulator::CostOptions rates;
    rates.flops_per_second = std::numeric_limits<double>::infinity();
    rates.memory_bandwidth = costs_.memory_bandwidth;
    rates.shared_memory = mesh_.world()->HasCommonMemory() && ranks > 1;
    rates.fence_seconds = rates.shared_memory ? costs_.latency : 0;
    rates.overlap = costs_.overlaps;
    rates.host = {costs_.latency / std::max(1, ranks - 1),
                  costs_.gather_bandwidth, costs_.reduce_bandwidth};
    FSDP_ASSIGN_OR_RETURN(const simulator::CostModel costs,
                          simulator::CostModel::Create(rates, ranks));
    planned.shape.work = ByUnit(profile_, membership);
    FSDP_ASSIGN_OR_RETURN(
        const simulator::StepResult result,
        simulator::SimulateStep(planned.shape, costs,
                                {planned.schedule, options_.memory}));
    candidate.seconds = result.seconds;
    if (planned.offload.has_value()) {
      candidate.seconds += TransferSeconds(
          *planned.offload, tier, options_.memory.backwards_per_step, costs_);
    }
    return absl::OkStatus();
  }

  const AutoOptions& options_;
  const comm::Mesh& mesh_;
  const StepProfile& profile_;
  const StepCosts& costs_;
  std::vector<Candidate> candidates_;
  std::vector<Options> choices_;  // by candidate
};

}  // namespace

absl::StatusOr<AutoChoice> ChooseOptions(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    const AutoOptions& options) {
  comm::Communicator& world = *mesh.world();
  const absl::Duration timeout = options.base.timeout > absl::ZeroDuration()
                                     ? *options.base.timeout
                                     : world.default_timeout();
  const auto deadline = [&] { return absl::Now() + timeout; };
  const auto agree = [&](const absl::Status& own) {
    return comm::Agree(world, own, "choosing options", deadline());
  };
  Options base;  // what was asked for, without what is chosen
  std::vector<Division> divisions;
  // A wrap policy of the user may throw.
  FSDP_RETURN_IF_ERROR(
      agree(TorchToStatus("choosing options", [&]() -> absl::Status {
        FSDP_RETURN_IF_ERROR(Check(options));
        base = options.base;
        base.unit.strategy = ShardingStrategy::kFullShard;
        FSDP_ASSIGN_OR_RETURN(divisions, DivisionsOf(module, mesh, base));
        base.recompute.units = nullptr;
        return absl::OkStatus();
      })));
  const ShardPlan& plan = divisions.front().plan;
  FSDP_RETURN_IF_ERROR(
      comm::CheckSame(world, TextOf(options) + Fingerprint(plan, base),
                      "the models to choose options for", deadline()));
  // All ranks measure; the result is that of rank 0.
  const absl::StatusOr<StepProfile> own =
      MeasureStep(plan, options.loss, options.rows, options.memory_bytes);
  FSDP_RETURN_IF_ERROR(agree(own.status()));
  FSDP_ASSIGN_OR_RETURN(const StepProfile profile,
                        OfRank0(world, *own, deadline()));
  std::optional<StepCosts> costs = options.costs;
  if (!costs.has_value()) {
    const at::Tensor& first = plan.tree.parameters.front().front();
    int64_t elements = 0;
    for (const auto& tied : plan.tree.parameters) {
      elements += tied.front().numel();
    }
    const auto units = static_cast<int64_t>(plan.units.size());
    FSDP_ASSIGN_OR_RETURN(
        costs, MeasureCosts(world, first.device(),
                            elements / units *
                                static_cast<int64_t>(first.element_size()),
                            base.offload.directory, timeout));
  }
  Search search(options, mesh, profile, *costs);
  absl::StatusOr<AutoChoice> choice = std::move(search).Choose(divisions);
  FSDP_RETURN_IF_ERROR(agree(choice.status()));
  FSDP_RETURN_IF_ERROR(comm::CheckSame(
      world, choice->ToString(), "the options that were chosen", deadline()));
  return choice;
}

absl::StatusOr<AutoChoice> ChooseOptions(
    const std::shared_ptr<torch::nn::Module>& module,
    std::shared_ptr<comm::Communicator> ranks, const AutoOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh,
                        comm::Mesh::Create(std::move(ranks), {{"shard", -1}}));
  return ChooseOptions(module, mesh, options);
}

}  // namespace fsdp
