// Options for where shards, gradients and optimizer states rest between uses,
// and how they get there and back.
#ifndef FSDP_OPTIONS_OFFLOAD_OPTIONS_H_
#define FSDP_OPTIONS_OFFLOAD_OPTIONS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "offload/param_store.h"

namespace fsdp {

// The places where memory can rest between uses.
enum class Tier {
  kDevice,  // where the model is
  kCpu,     // memory of the host; the same as kDevice if the model is there
  kSsd,     // files
};

// Returns "device", "cpu" or "ssd".
const char* ToString(Tier tier);

// The kinds of memory that can rest on a tier. Each has a file of its own.
enum class RestingKind { kParameters, kGradients, kOptimizer };
inline constexpr int kNumRestingKinds = 3;

// Returns "parameters", "gradients" or "optimizer".
const char* ToString(RestingKind kind);

// Selects who steps parameters that rest off the device. kDevice copies
// parameters and states to the device and back, as ZeRO-Infinity does. kHost
// copies gradients to the host, as ZeRO-Offload does. The results differ in the
// last bits.
enum class StepOn { kDevice, kHost };

// Returns "device" or "host".
const char* ToString(StepOn step_on);

// Selects what rests where. The same on all ranks.
struct OffloadOptions {
  // Shards, their gradients, and the states of this library's fused optimizers
  // (fused_optimizer.h) rest here. Other optimizers need all three on kDevice.
  Tier parameters = Tier::kDevice;
  Tier gradients = Tier::kDevice;
  Tier optimizer = Tier::kDevice;

  // Bytes of device memory that a rank may use for the three kinds, transfers
  // included. What fits stays on the device, parameters first and optimizer
  // states last, and the rest goes to its tier. Positive; if unset, everything
  // goes to its tier.
  std::optional<int64_t> memory_budget = std::nullopt;

  // Bytes of host memory for transfers from and to files, reading ahead and
  // writing behind included. Positive; if unset, the plan decides.
  std::optional<int64_t> buffer_bytes = std::nullopt;
  // How many of the next units are read, or gathered, while one computes.
  int prefetch_distance = 2;
  // Longest wait for a store. Positive; if unset, Options::timeout.
  std::optional<absl::Duration> timeout = std::nullopt;

  // Selects who steps parameters that rest off the device with their states. No
  // effect for a model on the CPU.
  StepOn step_on = StepOn::kDevice;

  // Locks the host memory that a device copies from and to, so that nothing
  // waits for copies. It takes seconds for each ten GiB when the model is
  // sharded, and has no effect unless //device_ops/cuda is linked.
  bool lock_pages = true;

  // Bytes of optimizer state per byte of trainable shard: 2 for Adam, 3 with
  // amsgrad, 1 for SGD with momentum.
  double optimizer_state = 2;

  // Undoes a step of the optimizer on all ranks if it fails half-way on one.
  // Needs optimizer states in files wherever parameters or gradients are. It
  // doubles the files of parameters and optimizer states.
  bool rollback = true;

  // These describe the files (offload/file_store.h). The directory is on an SSD
  // and has to exist.
  std::string directory;
  int64_t block_bytes = int64_t{1} << 20;  // of one read or write
  int queue_depth = 8;                     // of these at the same time

  // Keeps the files of parameters and optimizer states, which every step of the
  // optimizer commits, after the run. A run of the same model and `name` on as
  // many ranks goes on from the last step that all ranks have finished,
  // whenever they were killed; see OffloadStats::kept_steps. Parameters that
  // were written or loaded since are those of that step again. Needs these two
  // kinds on kSsd, no memory_budget, and one fused optimizer that does not step
  // in backward.
  bool keep = false;
  std::string name = "offload";

  // Makes stores other than files for kSsd, each for regions of `capacity`
  // bytes in all. A store that cannot roll back needs `rollback` false. Not
  // with `keep`.
  std::function<absl::StatusOr<std::unique_ptr<offload::ParamStore>>(
      RestingKind kind, int64_t capacity)>
      make_store;

  // Returns whether a kind rests off the device.
  bool any() const {
    return parameters != Tier::kDevice || gradients != Tier::kDevice ||
           optimizer != Tier::kDevice;
  }
  Tier tier(RestingKind kind) const;  // where that kind rests

  // InvalidArgument: a number is out of its range.
  absl::Status Validate() const;
};

// Counts what a model has off its device and what moving it has cost this rank.
struct OffloadStats {
  std::array<offload::StoreStats, kNumRestingKinds> stores;  // by RestingKind
  offload::OffloaderStats memory;  // of the host, in front of files
  // Steps of the optimizer in kept files (OffloadOptions::keep). A new model
  // starts with the number and the parameters of earlier runs.
  int64_t kept_steps = 0;
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_OFFLOAD_OPTIONS_H_
