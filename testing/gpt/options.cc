#include "testing/gpt/options.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <system_error>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/command_line.h"
#include "base/output_file.h"
#include "base/status_macros.h"

ABSL_FLAG(int, ranks, gpt::TrainOptions().ranks,
          "Ranks to start on this host, unless torchrun or another launcher "
          "does.");
ABSL_FLAG(std::string, backend, "auto", "shared_memory, gloo, or auto.");
ABSL_FLAG(std::string, device, "cpu",
          "cpu, or cuda, in //testing/gpt:train_cuda.");
ABSL_FLAG(std::string, sharding, "full",
          "full, gradients (parameters whole from forward to backward), "
          "optimizer (whole until backward reduces), replicated (all whole), "
          "or none: every rank trains a model of its own.");
ABSL_FLAG(std::string, offload, "none",
          "Where all rests that nothing computes with: none (where the model "
          "is), cpu, or ssd.");
ABSL_FLAG(std::string, offload_dir, "",
          "With --offload=ssd, and for --auto: a directory for files. "
          "Default: $TMPDIR, or /tmp.");
ABSL_FLAG(std::string, memory_budget, "0",
          "With --offload: bytes of memory for what rests and for its "
          "transfers, such as 8GiB.");
ABSL_FLAG(std::string, keep, "",
          "With --offload=ssd: the name of files that outlive the run; one "
          "that finds them goes on.");
ABSL_FLAG(bool, auto, false,
          "Choose units, sharding, prefetching, recomputation and what rests "
          "in files so that --auto-memory is enough.");
ABSL_FLAG(std::string, auto_memory, "0",
          "With --auto: bytes of memory that a rank may use, such as 8GiB.");
ABSL_FLAG(int64_t, layers, gpt::GptConfig().layers, "Transformer blocks.");
ABSL_FLAG(int64_t, dim, gpt::GptConfig().dim, "Width of the model.");
ABSL_FLAG(int64_t, heads, gpt::GptConfig().heads,
          "Attention heads; they divide --dim.");
ABSL_FLAG(int64_t, seq, gpt::GptConfig().seq, "Tokens per row.");
ABSL_FLAG(int64_t, vocab, gpt::GptConfig().vocab,
          "Different tokens; 256 for any bytes.");
ABSL_FLAG(int64_t, batch, gpt::TrainOptions().batch, "Rows per rank and step.");
ABSL_FLAG(int64_t, steps, gpt::TrainOptions().steps,
          "Training steps that are timed.");
ABSL_FLAG(int64_t, warmup, gpt::TrainOptions().warmup,
          "Training steps before those, not timed.");
ABSL_FLAG(uint64_t, seed, gpt::TrainOptions().seed,
          "Seed of the initial parameters.");
ABSL_FLAG(int, threads, gpt::TrainOptions().threads,
          "Compute threads per rank; 0: the host's cores divided among its "
          "ranks.");
ABSL_FLAG(std::string, json, "",
          "Write the report to this file as JSON. Counts of collectives are "
          "those of the timed steps.");
ABSL_FLAG(std::string, save_init, "",
          "Write the initial parameters to this new folder.");
ABSL_FLAG(
    std::string, init, "",
    "Read the initial parameters from this folder or safetensors file, or from "
    "the folder of a Hugging Face model or of a step of --save.");
ABSL_FLAG(std::string, save, "",
          "Keep checkpoints in this folder: when the run ends or is stopped "
          "by SIGTERM or SIGINT.");
ABSL_FLAG(int64_t, save_every, 0,
          "With --save: also after each so many steps; 0: only at the end.");
ABSL_FLAG(bool, save_async, true,
          "With --save: write beside the next steps, from a copy in memory.");
ABSL_FLAG(int64_t, keep_last, 0,
          "With --save: remove all but the newest so many; 0: keep all.");
ABSL_FLAG(bool, object_store, false,
          "With --save: its folder is on a mounted object store.");
ABSL_FLAG(bool, resume, false,
          "With --save: go on from the newest checkpoint, if there is one.");
ABSL_FLAG(int, max_restarts, 0,
          "With --save --resume, --keep or --replicas: start the ranks again "
          "when one has failed, at most so often.");
ABSL_FLAG(std::string, restart_ranks, "same",
          "With --max-restarts: as many ranks (same), or without those that "
          "have failed (fewer).");
ABSL_FLAG(int, replicas, 0,
          "Start so many replicas of --ranks ranks each, which outlive each "
          "other. What each writes has its number: --json=x is x.0. 0: one "
          "run.");
ABSL_FLAG(std::string, replica_history, "",
          "With --replicas: write who took part in which steps to this "
          "folder, of this run alone.");
ABSL_FLAG(std::string, replica_replay, "",
          "With --replicas: train as the run did that has written such a "
          "folder, losses of replicas included, to the same bits.");
ABSL_FLAG(std::string, export, "",
          "Write the trained model to this new folder, as a Hugging Face "
          "model with a config.json.");
ABSL_FLAG(std::string, trace, "",
          "Write what all ranks gather, wait for and compute to this file, "
          "for ui.perfetto.dev and //tools:trace_report.");
ABSL_FLAG(int64_t, trace_steps, gpt::TrainOptions().trace_steps,
          "With --trace: the last so many steps.");

namespace gpt {
namespace {

using ::fsdp::ReadFlag;
using ::fsdp::ResolvePath;
using ::fsdp::ShardingStrategy;
using ::fsdp::comm::Environment;

// Turns "--save-init=x" into "--save_init=x", but leaves dashes of the value.
void UseUnderscores(std::string& argument) {
  if (!absl::StartsWith(argument, "--")) return;
  const auto end = std::find(argument.begin(), argument.end(), '=');
  std::replace(argument.begin() + 2, end, '-', '_');
}

absl::Status ReadBytes(const absl::Flag<std::string>& flag, int64_t& value) {
  const std::string text = absl::GetFlag(flag);
  absl::string_view number = text;
  int64_t scale = 1;
  if (absl::ConsumeSuffix(&number, "GiB")) {
    scale = int64_t{1} << 30;
  } else if (absl::ConsumeSuffix(&number, "MiB")) {
    scale = int64_t{1} << 20;
  } else if (absl::ConsumeSuffix(&number, "KiB")) {
    scale = int64_t{1} << 10;
  }
  if (absl::SimpleAtoi(number, &value) && value >= 0 &&
      value <= std::numeric_limits<int64_t>::max() / scale) {
    value *= scale;
    return absl::OkStatus();
  }
  return fsdp::InvalidFlag(
      flag, text,
      "expected a number of bytes, such as 8GiB, 512MiB, 64KiB or 4096");
}

// The directory may be used by --auto, too.
absl::StatusOr<fsdp::OffloadOptions> ReadOffloadFlags() {
  fsdp::OffloadOptions options;
  fsdp::Tier tier = fsdp::Tier::kDevice;
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_offload,
      {{"none", tier}, {"cpu", fsdp::Tier::kCpu}, {"ssd", fsdp::Tier::kSsd}},
      tier));
  options.parameters = options.gradients = options.optimizer = tier;
  int64_t bytes = 0;
  FSDP_RETURN_IF_ERROR(ReadBytes(FLAGS_memory_budget, bytes));
  if (bytes > 0) options.memory_budget = bytes;
  options.keep = !absl::GetFlag(FLAGS_keep).empty();
  if (options.keep) options.name = absl::GetFlag(FLAGS_keep);
  options.directory = ResolvePath(absl::GetFlag(FLAGS_offload_dir));
  if (!options.any()) return options;
  if (options.directory.empty()) {
    std::error_code error;
    const auto path = std::filesystem::temp_directory_path(error);
    options.directory = error ? "/tmp" : path.string();
  }
  return options;
}

absl::StatusOr<TrainOptions> ReadFlags() {
  TrainOptions options;
  // Far more than any machine can train, little enough for 64-bit products.
  constexpr int kMany = 1 << 20, kMost = 1 << 30;
  GptConfig& model = options.model;
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_layers, 1, kMany, model.layers));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_dim, 1, kMany, model.dim));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_heads, 1, kMany, model.heads));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_seq, 1, kMany, model.seq));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_vocab, 1, kMany, model.vocab));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_ranks, 1, 1024, options.ranks));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_batch, 1, kMany, options.batch));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_steps, 1, kMost, options.steps));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_warmup, 0, kMost, options.warmup));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_threads, 0, 1024, options.threads));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_trace_steps, 1, kMost, options.trace_steps));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_save_every, 0, kMost, options.save_every));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_keep_last, 0, kMost, options.keep_last));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_max_restarts, 0, kMany, options.max_restarts));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_replicas, 0, 1024, options.replicas));
  FSDP_ASSIGN_OR_RETURN(options.backend,
                        fsdp::comm::ParseBackend(absl::GetFlag(FLAGS_backend)));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_device,
                                {{"cpu", c10::kCPU}, {"cuda", c10::kCUDA}},
                                options.device));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_sharding,
               {{"full", ShardingStrategy::kFullShard},
                {"gradients", ShardingStrategy::kShardGradOp},
                {"optimizer", ShardingStrategy::kShardOptimizer},
                {"replicated", ShardingStrategy::kNoShard},
                {"none", std::nullopt}},
               options.sharding));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_restart_ranks,
                                {{"same", false}, {"fewer", true}},
                                options.restart_fewer));
  FSDP_RETURN_IF_ERROR(ReadBytes(FLAGS_auto_memory, options.auto_memory));
  FSDP_ASSIGN_OR_RETURN(options.offload, ReadOffloadFlags());
  options.automatic = absl::GetFlag(FLAGS_auto);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.json = ResolvePath(absl::GetFlag(FLAGS_json));
  options.save_init = ResolvePath(absl::GetFlag(FLAGS_save_init));
  options.init = ResolvePath(absl::GetFlag(FLAGS_init));
  options.save = ResolvePath(absl::GetFlag(FLAGS_save));
  options.save_async = absl::GetFlag(FLAGS_save_async);
  options.object_store = absl::GetFlag(FLAGS_object_store);
  options.resume = absl::GetFlag(FLAGS_resume);
  options.replica_history = ResolvePath(absl::GetFlag(FLAGS_replica_history));
  options.replica_replay = ResolvePath(absl::GetFlag(FLAGS_replica_replay));
  options.export_dir = ResolvePath(absl::GetFlag(FLAGS_export));
  options.trace = ResolvePath(absl::GetFlag(FLAGS_trace));
  return options;
}

}  // namespace

absl::StatusOr<TrainOptions> ParseFlags(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  std::vector<char*> pointers;
  for (std::string& argument : arguments) {
    UseUnderscores(argument);
    pointers.push_back(&argument[0]);
  }
  FSDP_RETURN_IF_ERROR(fsdp::ParseFlags(
      static_cast<int>(pointers.size()), pointers.data(),
      "Trains a GPT on rows that count, with Fully Sharded Data Parallel.\n\n"
      "  bazel run //testing/gpt:train -- --ranks=4",
      "testing/gpt/options.cc"));
  return ReadFlags();
}

absl::StatusOr<TrainOptions> OptionsOfReplica(TrainOptions options,
                                              const Environment& environment) {
  const bool is_started =
      environment.started_by != fsdp::comm::StartedBy::kNobody ||
      environment.replicas > 0;
  if (options.replicas > 0 && is_started &&
      options.replicas != environment.replicas) {
    return absl::InvalidArgumentError(
        absl::StrCat("--replicas=", options.replicas,
                     ": this process was started as one of ",
                     environment.replicas, " replicas (FSDP_REPLICAS)"));
  }
  if (environment.replicas == 0) {
    const bool is_for_replicas =
        !options.replica_history.empty() || !options.replica_replay.empty();
    if (options.replicas > 0 || !is_for_replicas) return options;
    return absl::InvalidArgumentError(
        absl::StrCat(options.replica_history.empty() ? "--replica-replay"
                                                     : "--replica-history",
                     " without --replicas: a run alone has no other replicas"));
  }
  options.replicas = environment.replicas;
  for (std::string* path :
       {&options.json, &options.trace, &options.save_init, &options.save}) {
    if (!path->empty()) absl::StrAppend(path, ".", environment.replica);
  }
  return options;
}

}  // namespace gpt
