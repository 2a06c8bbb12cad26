// Decides before the first step what rests where, and how much memory that
// takes. Pure: no tensors, no files.
#ifndef FSDP_RESTING_OFFLOAD_PLAN_H_
#define FSDP_RESTING_OFFLOAD_PLAN_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/options/offload_options.h"

namespace fsdp {

// One flat parameter on this rank: bytes of its shard, and whether that has
// gradients and optimizer states.
struct RestingFlat {
  std::string name;
  int64_t parameters = 0;
  int64_t gradients = 0;  // 0: frozen
  int64_t optimizer = 0;
};

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
  // For transfers: of the host's memory, from and to kSsd, and of the device's;
  // where the CPU is the device, that is the same memory.
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
  int64_t ssd_bytes() const;
  // Whether anything rests elsewhere.
  bool leaves_device() const;
  // A line for each kind, and one for transfers.
  std::string ToString() const;
};

// Whether a flat parameter that stays in memory is copied to the SSD before its
// step, which reads states from there and may fail.
bool IsSavedBeforeStep(const OffloadPlan::Tiers& tiers,
                       const OffloadOptions& options);

// Parameters, which move up to four times a step, stay on the device before
// gradients and optimizer states, which move twice; each in the order of
// `flats`. `on_cpu`: the model is. InvalidArgument: a budget that is smaller
// than what transfers need, with what that is; options that cannot be.
absl::StatusOr<OffloadPlan> PlanOffload(const std::vector<RestingFlat>& flats,
                                        const OffloadOptions& options,
                                        bool on_cpu);

}  // namespace fsdp

#endif  // FSDP_RESTING_OFFLOAD_PLAN_H_
