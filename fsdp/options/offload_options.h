// Where what a rank keeps between uses rests, and how it gets there and back.
#ifndef FSDP_OPTIONS_OFFLOAD_OPTIONS_H_
#define FSDP_OPTIONS_OFFLOAD_OPTIONS_H_

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

enum class Tier {
  kDevice,  // where the model is
  kCpu,     // memory of the host; of a model on the CPU, kDevice
  kSsd,     // files
};

const char* ToString(Tier tier);

// What rests. Each kind has a file of its own.
enum class RestingKind { kParameters, kGradients, kOptimizer };
inline constexpr int kNumRestingKinds = 3;

const char* ToString(RestingKind kind);

// As ZeRO-Infinity and as ZeRO-Offload do: by the device, which takes and gives
// back parameters and states, or by the host, to which gradients come. The
// results differ in the last bits. kFaster: what a measurement of a second,
// when the model is sharded, says takes less time; the same on all ranks, and
// perhaps another one in the next run (Describe() tells).
enum class StepOn { kDevice, kHost, kFaster };

const char* ToString(StepOn step_on);

// The same on all ranks.
struct OffloadOptions {
  // Of shards, of their gradients, and of the states of this library's fused
  // optimizers (fused_optimizer.h); other optimizers need all three on kDevice.
  Tier parameters = Tier::kDevice;
  Tier gradients = Tier::kDevice;
  Tier optimizer = Tier::kDevice;

  // Bytes of the device that a rank may use for these, transfers included: what
  // fits stays there, parameters first and optimizer states last, and the rest
  // goes to its tier. Positive. Unset: all of it goes to its tier.
  std::optional<int64_t> memory_budget = std::nullopt;

  // Bytes of the host's memory, for transfers from and to files; what is read
  // ahead and written behind is in it. Positive. Unset: what the plan says.
  std::optional<int64_t> buffer_bytes = std::nullopt;
  // How many of the units that come next are read, or gathered, meanwhile.
  int prefetch_distance = 2;
  // Of each wait for a store; positive. Unset: that of Options::timeout.
  std::optional<absl::Duration> timeout = std::nullopt;

  // Where the optimizer of a model on a device steps parameters that rest
  // elsewhere with their states.
  StepOn step_on = StepOn::kDevice;

  // Of a model on a device: the memory on the host that it copies from and to
  // is locked, so that nothing waits for the copies. Takes seconds for each ten
  // GiB when the model is sharded. Where nothing linked can
  // (//device_ops/cuda), it is not.
  bool lock_pages = true;

  // Bytes of optimizer state per byte of trainable shard: 2 for Adam, 3 with
  // amsgrad, 1 for SGD with momentum.
  double optimizer_state = 2;

  // A step of the optimizer that fails half-way on any rank is undone on all,
  // where optimizer states rest in files whenever parameters or gradients do.
  // Doubles the files of parameters and optimizer states.
  bool rollback = true;

  // Of files; see offload/file_store.h. An SSD's directory, which exists.
  std::string directory;
  int64_t block_bytes = int64_t{1} << 20;
  int queue_depth = 8;
  bool checksums = true;

  // Files of parameters and optimizer states that outlive the run: every step
  // of the optimizer commits them, and a run of the same model and `name` on as
  // many ranks goes on from the last step that all ranks have finished,
  // whenever they were killed; see OffloadSpace::step(). For these two kinds on
  // kSsd, without a budget, and one fused optimizer that is not stepped in
  // backward.
  bool keep = false;
  std::string name = "offload";

  // Stores other than files for kSsd, each for regions of `capacity` bytes. One
  // that cannot roll back needs `rollback` false. Not with `keep`.
  std::function<absl::StatusOr<std::unique_ptr<offload::ParamStore>>(
      RestingKind kind, int64_t capacity)>
      make_store;

  bool any() const {
    return parameters != Tier::kDevice || gradients != Tier::kDevice ||
           optimizer != Tier::kDevice;
  }
  Tier tier(RestingKind kind) const;

  // InvalidArgument: a number that is not positive, or negative.
  absl::Status Validate() const;
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_OFFLOAD_OPTIONS_H_
