#include "fsdp/resting/offload_plan.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

// The number of reductions whose gradients are in memory at a time.
constexpr int kReductions = 2;
// In an optimizer step, one unit is read, one stepped and one written.
constexpr int kStepping = 3;
// In a step on a device, one unit is copied up and one down; stepping takes no
// time beside that.
constexpr int kCopied = 2;

absl::Status CheckOptions(const OffloadOptions& options) {
  FSDP_RETURN_IF_ERROR(options.Validate());
  const bool on_ssd = std::any_of(
      kRestingKinds.begin(), kRestingKinds.end(),
      [&](RestingKind kind) { return options.tier(kind) == Tier::kSsd; });
  if (on_ssd && options.directory.empty() && options.make_store == nullptr) {
    return absl::InvalidArgumentError(
        "offload to the SSD needs OffloadOptions::directory, where its files "
        "may lie");
  }
  if (options.keep &&
      (options.parameters != Tier::kSsd || options.optimizer != Tier::kSsd ||
       options.memory_budget.has_value() || options.make_store != nullptr)) {
    return absl::InvalidArgumentError(
        "offload: files are kept of runs whose parameters and optimizer states "
        "all rest in them: put both on the ssd tier, without memory_budget and "
        "make_store");
  }
  return absl::OkStatus();
}

// The most bytes of any flat parameter that are on their way.
struct MostBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t step = 0;  // all that a step of the optimizer uses

  void Add(RestingKind kind, int64_t bytes) {
    if (kind == RestingKind::kParameters) {
      parameters = std::max(parameters, bytes);
    }
    if (kind == RestingKind::kGradients) gradients = std::max(gradients, bytes);
  }
  int64_t computing(const OffloadOptions& options) const {
    return (options.prefetch_distance + 1) * parameters +
           (kReductions + 1) * gradients;
  }
};

// Returns bytes with which the unit before can be written and the next ones
// read while one is used. Pieces of several sizes leave gaps: one piece is
// added.
int64_t BufferBytes(const std::vector<RestingFlat>& flats,
                    const OffloadPlan& plan, const OffloadOptions& options) {
  MostBytes most;
  int64_t piece = 0;
  for (size_t i = 0; i < flats.size(); ++i) {
    int64_t of_flat = 0;
    for (RestingKind kind : kRestingKinds) {
      if (plan.tier(static_cast<int>(i), kind) != Tier::kSsd) continue;
      const int64_t bytes = offload::StoredBytes(flats[i].of(kind));
      most.Add(kind, bytes);
      // Each of the optimizer's slots is a piece of the states.
      piece = std::max(piece, std::min(bytes, flats[i].parameters));
      of_flat += bytes + offload::kPageBytes * kNumRestingKinds;
    }
    if (IsSavedBeforeStep(plan.flats[i], options)) {
      of_flat += offload::StoredBytes(flats[i].parameters);
    }
    most.step = std::max(most.step, of_flat);
  }
  return std::max(kStepping * most.step, most.computing(options)) +
         offload::StoredBytes(piece);
}

// Returns bytes with which copies up to a device need not wait for copies down.
int64_t TransferBytes(const std::vector<RestingFlat>& flats,
                      const OffloadPlan& plan, const OffloadOptions& options) {
  MostBytes most;
  for (size_t i = 0; i < flats.size(); ++i) {
    int64_t of_flat = 0;
    for (RestingKind kind : kRestingKinds) {
      if (plan.tier(static_cast<int>(i), kind) == Tier::kDevice) continue;
      most.Add(kind, flats[i].of(kind));
      of_flat += flats[i].of(kind);
    }
    most.step = std::max(most.step, of_flat);
  }
  if (options.step_on == StepOn::kHost) most.step = 0;
  return std::max(kCopied * most.step, most.computing(options));
}

void CountTransfers(const std::vector<RestingFlat>& flats,
                    const OffloadOptions& options, bool on_cpu,
                    OffloadPlan& plan) {
  const auto rests_in_files = [](const OffloadPlan::Tiers& tiers) {
    return std::find(tiers.begin(), tiers.end(), Tier::kSsd) != tiers.end();
  };
  plan.buffer_bytes = 0;
  if (std::any_of(plan.flats.begin(), plan.flats.end(), rests_in_files)) {
    plan.buffer_bytes = options.buffer_bytes.has_value()
                            ? *options.buffer_bytes
                            : BufferBytes(flats, plan, options);
  }
  plan.transfer_bytes =
      on_cpu ? plan.buffer_bytes : TransferBytes(flats, plan, options);
}

void KeepWhatFits(const std::vector<RestingFlat>& flats, int64_t room,
                  OffloadPlan& plan) {
  for (RestingKind kind : kRestingKinds) {
    for (size_t i = 0; i < flats.size(); ++i) {
      Tier& tier = plan.flats[i][static_cast<int>(kind)];
      const int64_t bytes = flats[i].of(kind);
      if (tier == Tier::kDevice || bytes > room) continue;
      tier = Tier::kDevice;
      room -= bytes;
    }
  }
}

}  // namespace

absl::StatusOr<OffloadPlan> PlanOffload(const std::vector<RestingFlat>& flats,
                                        const OffloadOptions& options,
                                        bool on_cpu) {
  FSDP_RETURN_IF_ERROR(CheckOptions(options));
  OffloadPlan plan;
  plan.budget = options.memory_budget.value_or(0);
  int64_t fixed = 0;  // on the device because of the options
  int64_t movable = 0;
  for (const RestingFlat& flat : flats) {
    OffloadPlan::Tiers& tiers = plan.flats.emplace_back();
    for (RestingKind kind : kRestingKinds) {
      Tier tier = options.tier(kind);
      if (tier == Tier::kCpu && on_cpu) tier = Tier::kDevice;
      if (flat.of(kind) == 0) tier = Tier::kDevice;
      tiers[static_cast<int>(kind)] = tier;
      (tier == Tier::kDevice ? fixed : movable) += flat.of(kind);
    }
  }
  CountTransfers(flats, options, on_cpu, plan);
  if (options.memory_budget.has_value()) {
    const int64_t budget = *options.memory_budget;
    const int64_t needed = fixed + plan.transfer_bytes;
    if (fixed + movable <= budget) {
      KeepWhatFits(flats, movable, plan);
    } else if (needed > budget) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "offload: a memory budget of %d bytes is too small: %d bytes may not "
          "leave the device by these tiers, and transfers need %d; allow %d "
          "bytes, offload more kinds, or make units smaller",
          budget, fixed, plan.transfer_bytes, needed));
    } else {
      KeepWhatFits(flats, budget - needed, plan);
    }
    CountTransfers(flats, options, on_cpu, plan);
  }
  for (size_t i = 0; i < flats.size(); ++i) {
    for (RestingKind kind : kRestingKinds) {
      OffloadPlan::Bytes& bytes = plan.bytes[static_cast<int>(kind)];
      const Tier tier = plan.tier(static_cast<int>(i), kind);
      (tier == Tier::kDevice ? bytes.device
       : tier == Tier::kCpu  ? bytes.cpu
                             : bytes.ssd) += flats[i].of(kind);
    }
  }
  return plan;
}

bool IsSavedBeforeStep(const OffloadPlan::Tiers& tiers,
                       const OffloadOptions& options) {
  const Tier parameters = tiers[static_cast<int>(RestingKind::kParameters)];
  const Tier optimizer = tiers[static_cast<int>(RestingKind::kOptimizer)];
  return options.rollback && optimizer == Tier::kSsd &&
         parameters != Tier::kSsd;
}

int64_t OffloadPlan::device_bytes() const {
  int64_t total = transfer_bytes;
  for (const Bytes& kind : bytes) total += kind.device;
  return total;
}

bool OffloadPlan::leaves_device() const {
  return std::any_of(bytes.begin(), bytes.end(), [](const Bytes& kind) {
    return kind.cpu > 0 || kind.ssd > 0;
  });
}

std::string OffloadPlan::ToString() const {
  const auto mib = [](int64_t bytes) {
    return static_cast<double>(bytes) / (1 << 20);
  };
  std::string text = absl::StrFormat("%-34s %12s %12s %12s\n", "rests, in MiB",
                                     "device", "cpu", "ssd");
  for (RestingKind kind : kRestingKinds) {
    const Bytes& of_kind = of(kind);
    absl::StrAppendFormat(&text, "  %-32s %12.2f %12.2f %12.2f\n",
                          fsdp::ToString(kind), mib(of_kind.device),
                          mib(of_kind.cpu), mib(of_kind.ssd));
  }
  absl::StrAppendFormat(&text, "  %-32s %12.2f", "buffers for transfers",
                        mib(transfer_bytes));
  if (transfer_bytes != buffer_bytes) {
    absl::StrAppendFormat(&text, " %12.2f", mib(buffer_bytes));
  }
  absl::StrAppend(&text, "\n");
  absl::StrAppendFormat(&text, "  %-32s %12.2f", "total", mib(device_bytes()));
  if (budget > 0) {
    absl::StrAppendFormat(&text, " of a budget of %.2f", mib(budget));
  }
  absl::StrAppend(&text, "\n");
  return text;
}

}  // namespace fsdp
