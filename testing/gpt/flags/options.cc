#include "testing/gpt/flags/options.h"

#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gpt {
namespace {

absl::Status CheckRange(absl::string_view flag, int64_t value, int64_t least,
                        int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", value, ": expected ", least, " to ", most));
}

absl::Status CheckModel(const GptConfig& model) {
  // Far more than any machine can train, little enough for 64-bit products.
  constexpr int64_t kMost = 1 << 20;
  FSDP_RETURN_IF_ERROR(CheckRange("layers", model.layers, 1, kMost));
  FSDP_RETURN_IF_ERROR(CheckRange("dim", model.dim, 1, kMost));
  FSDP_RETURN_IF_ERROR(CheckRange("heads", model.heads, 1, kMost));
  FSDP_RETURN_IF_ERROR(CheckRange("seq", model.seq, 1, kMost));
  FSDP_RETURN_IF_ERROR(CheckRange("vocab", model.vocab, 1, kMost));
  if (model.dim % model.heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--heads=", model.heads, " does not divide --dim=", model.dim,
        ": each head gets an equal part of it"));
  }
  return absl::OkStatus();
}

absl::Status CheckDevice(const TrainOptions& options) {
  if (options.device == Device::kCpu) {
    if (!options.staged) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "--staged without --device=cuda: it is for tensors on GPUs; --backend "
        "chooses for those on the CPU");
  }
  if (options.backend == Backend::kLocal && options.ranks > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--backend=local with --device=cuda and --ranks=", options.ranks,
        ": ranks that use GPUs are processes; leave --backend away"));
  }
  return absl::OkStatus();
}

absl::Status CheckSaving(const TrainOptions& options) {
  FSDP_RETURN_IF_ERROR(
      CheckRange("save-every", options.save_every, 0, 1 << 30));
  FSDP_RETURN_IF_ERROR(CheckRange("keep-last", options.keep_last, 0, 1 << 30));
  if (options.resume && options.offload.keep) {
    return absl::InvalidArgumentError(
        "--resume with --keep: a run goes on from checkpoints, or from the "
        "files that --offload=ssd has kept; leave one of them away");
  }
  if (!options.save.empty()) return absl::OkStatus();
  const absl::string_view flag = options.resume           ? "resume"
                                 : options.save_every > 0 ? "save-every"
                                 : options.keep_last > 0  ? "keep-last"
                                                          : "";
  if (flag.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, " without --save, which names the folder of checkpoints"));
}

// Refuses restarts that would not find what the run had.
absl::Status CheckRestarts(const TrainOptions& options) {
  FSDP_RETURN_IF_ERROR(
      CheckRange("max-restarts", options.max_restarts, 0, 1 << 20));
  FSDP_RETURN_IF_ERROR(
      CheckRange("min-ranks", options.min_ranks, 1, options.ranks));
  const bool fewer = options.restart_ranks == RestartRanks::kFewer;
  if (options.max_restarts == 0) {
    if (!fewer && options.min_ranks == 1) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(fewer ? "--restart-ranks=fewer" : "--min-ranks",
                     " without --max-restarts, which says how often a run is "
                     "started again"));
  }
  if (options.backend == Backend::kLocal && options.ranks > 1) {
    return absl::InvalidArgumentError(
        "--max-restarts with --backend=local: ranks that are threads of one "
        "process end together; leave --backend away");
  }
  const bool keeps = options.offload.keep;
  if (keeps && fewer) {
    return absl::InvalidArgumentError(
        "--restart-ranks=fewer with --keep, whose files are for one number of "
        "ranks: --save --resume goes on with any");
  }
  // A replica can take from another one what it has not saved.
  const bool takes = options.replicas > 0 && options.save.empty();
  if (!keeps && !takes && !options.resume) {
    return absl::InvalidArgumentError(
        "--max-restarts without --save and --resume, or --keep, or --replicas: "
        "there would be nothing to go on from");
  }
  return absl::OkStatus();
}

absl::Status CheckReplicas(const TrainOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckRange("replicas", options.replicas, 0, 1024));
  if (options.replicas == 0) return absl::OkStatus();
  const absl::string_view flag =
      options.backend == Backend::kLocal              ? "backend=local"
      : options.device != Device::kCpu                ? "device=cuda"
      : options.offload.keep                          ? "keep"
      : options.restart_ranks == RestartRanks::kFewer ? "restart-ranks=fewer"
                                                      : "";
  if (flag.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--replicas with --", flag,
      ": replicas are processes that train on the CPU, each with as many ranks "
      "as the others, and take model and optimizer from each other"));
}

// Refuses flags for what --auto chooses.
absl::Status CheckAuto(const TrainOptions& options) {
  if (!options.automatic) {
    if (options.auto_memory == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "--auto-memory without --auto, which chooses how to use it");
  }
  if (options.auto_memory == 0) {
    return absl::InvalidArgumentError(
        "--auto needs --auto-memory: the bytes that a rank may use, such as "
        "--auto-memory=8GiB");
  }
  const absl::string_view flag = options.sharding != Sharding::kFull
                                     ? "sharding"
                                 : options.offload.any() ? "offload"
                                 : options.recompute     ? "recompute"
                                 : options.replicas > 0  ? "replicas"
                                                         : "";
  if (flag.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--auto with --", flag,
      flag == "replicas"
          ? ": replicas have to be alike, and each would choose for itself"
          : ", which it chooses itself: leave one of them away"));
}

}  // namespace

absl::Status CheckOptions(const TrainOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckModel(options.model));
  FSDP_RETURN_IF_ERROR(CheckRange("ranks", options.ranks, 1, 1024));
  FSDP_RETURN_IF_ERROR(CheckRange("batch", options.batch, 1, 1 << 20));
  FSDP_RETURN_IF_ERROR(CheckRange("steps", options.steps, 1, 1 << 30));
  FSDP_RETURN_IF_ERROR(CheckRange("warmup", options.warmup, 0, 1 << 30));
  FSDP_RETURN_IF_ERROR(CheckRange("threads", options.threads, 0, 1024));
  if (!(options.jitter >= 0 && options.jitter <= 100)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--jitter=", options.jitter, ": expected 0 to 100"));
  }
  FSDP_RETURN_IF_ERROR(CheckRange("jitter-rank", options.jitter_rank, 0, 1023));
  FSDP_RETURN_IF_ERROR(CheckRange("sample", options.sample, 0, 1 << 20));
  FSDP_RETURN_IF_ERROR(
      CheckRange("trace-steps", options.trace_steps, 1, 1 << 30));
  FSDP_RETURN_IF_ERROR(CheckDevice(options));
  FSDP_RETURN_IF_ERROR(CheckSaving(options));
  FSDP_RETURN_IF_ERROR(CheckRestarts(options));
  FSDP_RETURN_IF_ERROR(CheckReplicas(options));
  FSDP_RETURN_IF_ERROR(CheckAuto(options));
  if (options.sharding == Sharding::kNone &&
      options.precision != ComputeDtype::kFloat) {
    return absl::InvalidArgumentError(
        "--precision=bf16 with --sharding=none: only sharded models compute in "
        "another dtype than that of their parameters. --ranks=1 "
        "--sharding=full shards over one rank");
  }
  if (options.sharding == Sharding::kNone && options.offload.any()) {
    return absl::InvalidArgumentError(
        "--offload with --sharding=none: only what is sharded rests elsewhere. "
        "--ranks=1 --sharding=full shards over one rank");
  }
  if (options.sharding == Sharding::kNone && options.recompute) {
    return absl::InvalidArgumentError(
        "--recompute with --sharding=none: only blocks of sharded models are "
        "recomputed. --ranks=1 --sharding=full shards over one rank");
  }
  if (!std::isfinite(options.lr) || options.lr < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--lr=", options.lr, ": expected a finite number of 0 or more"));
  }
  return absl::OkStatus();
}

}  // namespace gpt
