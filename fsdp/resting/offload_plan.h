// Decides before the first step what rests where, and how much memory that
// takes, without tensors and files.
#ifndef FSDP_RESTING_OFFLOAD_PLAN_H_
#define FSDP_RESTING_OFFLOAD_PLAN_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/options/offload_options.h"

namespace fsdp {

// The bytes of one flat parameter on this rank: of its shard, of its gradients
// and of its optimizer states.
struct RestingFlat {
  std::string name;
  int64_t parameters = 0;
  int64_t gradients = 0;  // 0: frozen
  int64_t optimizer = 0;

  int64_t of(RestingKind kind) const {
    return kind == RestingKind::kParameters  ? parameters
           : kind == RestingKind::kGradients ? gradients
                                             : optimizer;
  }
};

inline constexpr std::array<RestingKind, kNumRestingKinds> kRestingKinds = {
    RestingKind::kParameters, RestingKind::kGradients, RestingKind::kOptimizer};

struct OffloadPlan {
  // Indexed by RestingKind.
  using Tiers = std::array<Tier, kNumRestingKinds>;
  struct Bytes {
    int64_t device = 0;
    int64_t cpu = 0;
    int64_t ssd = 0;
  };

  std::vector<Tiers> flats;
  std::array<Bytes, kNumRestingKinds> bytes = {};
  // Memory for transfers: on the host, from and to kSsd, and on the device. It
  // is the same memory if the model is on the CPU.
  int64_t buffer_bytes = 0;
  int64_t transfer_bytes = 0;
  int64_t budget = 0;  // 0: none

  Tier tier(int flat, RestingKind kind) const {
    return flats[flat][static_cast<int>(kind)];
  }
  const Bytes& of(RestingKind kind) const {
    return bytes[static_cast<int>(kind)];
  }
  int64_t device_bytes() const;
  // Returns whether anything rests off the device.
  bool leaves_device() const;
  // Returns a table with a line for each kind and one for transfers.
  std::string ToString() const;
};

// Returns whether a flat parameter that rests in memory is copied to the SSD
// before its step: the step reads states from there and may fail.
bool IsSavedBeforeStep(const OffloadPlan::Tiers& tiers,
                       const OffloadOptions& options);

// Plans the tiers of `flats`. Within the budget the device keeps parameters
// first, which move up to four times a step, and then gradients and optimizer
// states, which move twice; each kind in the order of `flats`. `on_cpu`: the
// model is on the CPU. InvalidArgument: options contradict each other, or the
// budget is too small; the text tells what is needed.
absl::StatusOr<OffloadPlan> PlanOffload(const std::vector<RestingFlat>& flats,
                                        const OffloadOptions& options,
                                        bool on_cpu);

}  // namespace fsdp

#endif  // FSDP_RESTING_OFFLOAD_PLAN_H_
