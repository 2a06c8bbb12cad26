#include "testing/gpt/flags/flags.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "fsdp/options/offload_options.h"
#include "testing/gpt/flags/offload_flags.h"

namespace gpt {

// Its text is a number, or "auto" for 0.
struct Threads {
  int count = TrainOptions().threads;
};

bool AbslParseFlag(absl::string_view text, Threads* threads,
                   std::string* error) {
  threads->count = 0;
  if (text == "auto") return true;
  return absl::ParseFlag(text, &threads->count, error);
}

std::string AbslUnparseFlag(const Threads& threads) {
  return threads.count == 0 ? "auto" : absl::UnparseFlag(threads.count);
}

// Abseil finds these two next to the type Backend.
bool AbslParseFlag(absl::string_view text, Backend* backend,
                   std::string* error) {
  if (text == "auto") {
    *backend = Backend::kAuto;
  } else if (text == "local") {
    *backend = Backend::kLocal;
  } else if (text == "shared_memory") {
    *backend = Backend::kSharedMemory;
  } else if (text == "gloo") {
    *backend = Backend::kGloo;
  } else {
    *error = "expected auto, local, shared_memory or gloo";
    return false;
  }
  return true;
}

std::string AbslUnparseFlag(Backend backend) {
  switch (backend) {
    case Backend::kAuto:
      return "auto";
    case Backend::kLocal:
      return "local";
    case Backend::kSharedMemory:
      return "shared_memory";
    case Backend::kGloo:
      return "gloo";
  }
  return "?";
}

bool AbslParseFlag(absl::string_view text, Device* device, std::string* error) {
  if (text != "cpu" && text != "cuda") {
    *error = "expected cpu or cuda";
    return false;
  }
  *device = text == "cpu" ? Device::kCpu : Device::kCuda;
  return true;
}

std::string AbslUnparseFlag(Device device) {
  return device == Device::kCpu ? "cpu" : "cuda";
}

std::string AbslUnparseFlag(Sharding sharding) {
  switch (sharding) {
    case Sharding::kFull:
      return "full";
    case Sharding::kGradients:
      return "gradients";
    case Sharding::kOptimizer:
      return "optimizer";
    case Sharding::kReplicated:
      return "replicated";
    case Sharding::kNone:
      return "none";
  }
  return "?";
}

bool AbslParseFlag(absl::string_view text, Sharding* sharding,
                   std::string* error) {
  for (const Sharding each :
       {Sharding::kFull, Sharding::kGradients, Sharding::kOptimizer,
        Sharding::kReplicated, Sharding::kNone}) {
    if (text != AbslUnparseFlag(each)) continue;
    *sharding = each;
    return true;
  }
  *error = "expected full, gradients, optimizer, replicated or none";
  return false;
}

bool AbslParseFlag(absl::string_view text, RestartRanks* ranks,
                   std::string* error) {
  if (text != "same" && text != "fewer") {
    *error = "expected same or fewer";
    return false;
  }
  *ranks = text == "same" ? RestartRanks::kSame : RestartRanks::kFewer;
  return true;
}

std::string AbslUnparseFlag(RestartRanks ranks) {
  return ranks == RestartRanks::kSame ? "same" : "fewer";
}

bool AbslParseFlag(absl::string_view text, ComputeDtype* dtype,
                   std::string* error) {
  if (text != "fp32" && text != "bf16") {
    *error = "expected fp32 or bf16";
    return false;
  }
  *dtype = text == "fp32" ? ComputeDtype::kFloat : ComputeDtype::kBFloat16;
  return true;
}

std::string AbslUnparseFlag(ComputeDtype dtype) {
  return dtype == ComputeDtype::kFloat ? "fp32" : "bf16";
}

}  // namespace gpt

ABSL_FLAG(int, ranks, gpt::TrainOptions().ranks,
          "Ranks to start on this host. Under torchrun, Slurm and mpirun these "
          "decide instead.");
ABSL_FLAG(gpt::Backend, backend, gpt::TrainOptions().backend,
          "How ranks talk: local (threads of one process), shared_memory "
          "(processes of one host), gloo (processes, TCP), auto (what is "
          "fastest where the ranks are).");
ABSL_FLAG(gpt::Device, device, gpt::TrainOptions().device,
          "Where the model is: cpu, or cuda: rank r of a host takes GPU r "
          "modulo their number. cuda needs //testing/gpt:train_cuda, built "
          "with --config=cuda.");
ABSL_FLAG(bool, staged, gpt::TrainOptions().staged,
          "With --device=cuda: exchange what is on GPUs by way of host memory "
          "and --backend, in place of NCCL, so that ranks may share a GPU.");
ABSL_FLAG(gpt::Sharding, sharding, gpt::TrainOptions().sharding,
          "full: parameters, gradients and optimizer state are split over the "
          "ranks. gradients: the same, with parameters whole from forward to "
          "backward. optimizer: whole until backward reduces. replicated: "
          "everything whole, gradients are averaged. none: every rank trains a "
          "whole model on its own data and exchanges no gradients, for "
          "comparison.");
ABSL_FLAG(gpt::ComputeDtype, precision, gpt::TrainOptions().precision,
          "fp32, or bf16: gather and compute in bf16, reduce and keep "
          "parameters and optimizer state in fp32. Not with --sharding=none.");
ABSL_FLAG(gpt::OffloadTier, offload, gpt::OffloadTier(),
          "Where parameters, gradients and optimizer state rest while nothing "
          "computes with them: none: where the model is; cpu: host memory, "
          "where a model on the CPU is anyway; ssd: files. Losses are the "
          "same. Not with --sharding=none.");
ABSL_FLAG(gpt::OffloadKinds, offload_kinds, gpt::OffloadKinds(),
          "What goes there; a list.");
ABSL_FLAG(std::string, offload_dir, "",
          "With --offload=ssd: a directory for files, which vanish with the "
          "run; an SSD's. Default: $TMPDIR, or /tmp. With --auto: the same, if "
          "files may be used; default: they may not.");
ABSL_FLAG(gpt::ByteCount, memory_budget, gpt::ByteCount(),
          "With --offload: bytes of memory that a rank may use for what rests "
          "and for its transfers, such as 8GiB, 512MiB or 4096. What fits "
          "stays in memory. 0: nothing stays there.");
ABSL_FLAG(std::string, keep, gpt::OffloadFlags().keep,
          "With --offload=ssd: the name of files in --offload-dir that outlive "
          "the run. A run that finds them, whenever the one before ended or "
          "was killed, goes on from its last finished step.");
ABSL_FLAG(bool, recompute, gpt::TrainOptions().recompute,
          "Activation checkpointing: keep a block's input only, and run its "
          "forward again in backward. Losses are the same. Not with "
          "--sharding=none.");
ABSL_FLAG(
    bool, auto, gpt::TrainOptions().automatic,
    "Choose units, sharding, prefetching, recomputation and what rests in "
    "files, so that a rank needs at most --auto-memory and a step takes "
    "as little time as that allows. Prints what was considered, and why "
    "it was not taken. Measures some steps first. Not with --sharding, "
    "--offload, --recompute or --replicas.");
ABSL_FLAG(gpt::ByteCount, auto_memory, gpt::ByteCount(),
          "With --auto: bytes of memory that a rank may use for parameters, "
          "gradients, optimizer state, buffers and activations, such as 8GiB; "
          "the program and its data come on top. Files may be used where "
          "--offload-dir names a directory.");
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
          "Seed of the initial parameters and of the order of the text.");
ABSL_FLAG(double, lr, gpt::TrainOptions().lr, "Learning rate of AdamW.");
ABSL_FLAG(gpt::Threads, threads, gpt::Threads(),
          "Compute threads per rank; auto: the host's cores divided among its "
          "ranks.");
ABSL_FLAG(double, jitter, gpt::TrainOptions().jitter,
          "For benchmarks: blocks of rank --jitter-rank take longer by a part "
          "of their time that is random between 0 and this.");
ABSL_FLAG(int, jitter_rank, gpt::TrainOptions().jitter_rank,
          "With --jitter: the rank that is slower.");
ABSL_FLAG(std::string, data, gpt::TrainOptions().data,
          "A text file, a directory of them, or \"count\" for synthetic rows. "
          "Default: the C++ headers of LibTorch.");
ABSL_FLAG(std::string, json, gpt::TrainOptions().json,
          "Write the report to this file as JSON. Counts of collectives are "
          "those of the timed steps.");
ABSL_FLAG(std::string, save_init, gpt::TrainOptions().save_init,
          "Write the initial parameters to this safetensors file.");
ABSL_FLAG(std::string, init, gpt::TrainOptions().init,
          "Read the initial parameters from this safetensors file, or from the "
          "folder of a Hugging Face model or of a step of --save.");
ABSL_FLAG(std::string, save, gpt::TrainOptions().save,
          "Keep checkpoints in this folder, which other runs do not use: the "
          "model, the optimizer's state, random states and the place in the "
          "data, when the run ends or is stopped by SIGTERM or SIGINT. Any "
          "number of ranks reads them. Not with --sharding=none on several "
          "ranks.");
ABSL_FLAG(int64_t, save_every, gpt::TrainOptions().save_every,
          "With --save: also after each so many steps; 0: only at the end.");
ABSL_FLAG(bool, save_async, gpt::TrainOptions().save_async,
          "With --save: write beside the next steps, from a copy in memory.");
ABSL_FLAG(int64_t, keep_last, gpt::TrainOptions().keep_last,
          "With --save: remove all but the newest so many; 0: keep all.");
ABSL_FLAG(bool, object_store, gpt::TrainOptions().object_store,
          "With --save: its folder is on a mounted object store. Each rank "
          "writes files of its own, and the manifest commits.");
ABSL_FLAG(bool, resume, gpt::TrainOptions().resume,
          "With --save: go on from the newest checkpoint, or begin where there "
          "is none. With as many ranks as before, losses are those of an "
          "unbroken run, to the bit. Parameters and learning rate are the "
          "checkpoint's then. Not with --keep.");
ABSL_FLAG(int, max_restarts, gpt::TrainOptions().max_restarts,
          "With --save --resume, or --keep: start the ranks again when one has "
          "failed, at most so often, to go on from the newest checkpoint; with "
          "--replicas those of its replica. Not "
          "when the run is told to stop, when it was asked for what cannot be "
          "(exit code 2), or after three attempts in a row that have saved "
          "nothing new. Under torchrun its own --max-restarts decides.");
ABSL_FLAG(gpt::RestartRanks, restart_ranks, gpt::TrainOptions().restart_ranks,
          "With --max-restarts: with as many ranks (same), or without those "
          "that have failed (fewer): their batches are others then.");
ABSL_FLAG(int, min_ranks, gpt::TrainOptions().min_ranks,
          "With --restart-ranks=fewer: with fewer than this the run ends.");
ABSL_FLAG(int, replicas, gpt::TrainOptions().replicas,
          "Start so many replicas of --ranks ranks each, which outlive each "
          "other: each trains the whole model on its part of every step, and "
          "one that loses a rank leaves. With --max-restarts it is started "
          "again and takes model and optimizer from another one. What a "
          "replica writes has its number: --json=x is x.0, --save=d is d.0. 0: "
          "one run.");
ABSL_FLAG(std::string, replica_history, gpt::TrainOptions().replica_history,
          "With --replicas: write who took part in which steps to this "
          "folder, of this run alone.");
ABSL_FLAG(std::string, replica_replay, gpt::TrainOptions().replica_replay,
          "With --replicas: train as the run did that has written such a "
          "folder, losses of replicas included, to the same bits.");
ABSL_FLAG(std::string, export, gpt::TrainOptions().export_dir,
          "Write the trained model to this new folder, as a Hugging Face model "
          "with a config.json. Not with --sharding=none on several ranks.");
ABSL_FLAG(std::string, trace, gpt::TrainOptions().trace,
          "Write what all ranks gather, wait for and compute to this file, for "
          "ui.perfetto.dev and //tools:trace_report.");
ABSL_FLAG(int64_t, trace_steps, gpt::TrainOptions().trace_steps,
          "With --trace: the last so many steps.");
ABSL_FLAG(int64_t, sample, gpt::TrainOptions().sample,
          "Bytes of text to sample at the end.");

namespace gpt {
namespace {

using ::fsdp::ResolvePath;

// Turns "--save-init=x" into "--save_init=x", but leaves dashes of the value.
void UseUnderscores(std::string& argument) {
  if (!absl::StartsWith(argument, "--")) return;
  const auto end = std::find(argument.begin(), argument.end(), '=');
  std::replace(argument.begin() + 2, end, '-', '_');
}

absl::StatusOr<fsdp::OffloadOptions> ReadOffloadFlags() {
  OffloadFlags flags;
  flags.tier = absl::GetFlag(FLAGS_offload);
  flags.kinds = absl::GetFlag(FLAGS_offload_kinds);
  flags.directory = ResolvePath(absl::GetFlag(FLAGS_offload_dir));
  flags.memory_budget = absl::GetFlag(FLAGS_memory_budget);
  flags.keep = absl::GetFlag(FLAGS_keep);
  flags.automatic = absl::GetFlag(FLAGS_auto);
  return ToOffloadOptions(flags);
}

absl::StatusOr<TrainOptions> ReadFlags() {
  TrainOptions options;
  options.model = {absl::GetFlag(FLAGS_vocab), absl::GetFlag(FLAGS_dim),
                   absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_heads),
                   absl::GetFlag(FLAGS_seq)};
  options.ranks = absl::GetFlag(FLAGS_ranks);
  options.backend = absl::GetFlag(FLAGS_backend);
  options.device = absl::GetFlag(FLAGS_device);
  options.staged = absl::GetFlag(FLAGS_staged);
  options.sharding = absl::GetFlag(FLAGS_sharding);
  options.precision = absl::GetFlag(FLAGS_precision);
  FSDP_ASSIGN_OR_RETURN(options.offload, ReadOffloadFlags());
  options.recompute = absl::GetFlag(FLAGS_recompute);
  options.automatic = absl::GetFlag(FLAGS_auto);
  options.auto_memory = absl::GetFlag(FLAGS_auto_memory).bytes;
  options.batch = absl::GetFlag(FLAGS_batch);
  options.steps = absl::GetFlag(FLAGS_steps);
  options.warmup = absl::GetFlag(FLAGS_warmup);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.lr = absl::GetFlag(FLAGS_lr);
  options.threads = absl::GetFlag(FLAGS_threads).count;
  options.jitter = absl::GetFlag(FLAGS_jitter);
  options.jitter_rank = absl::GetFlag(FLAGS_jitter_rank);
  options.data = absl::GetFlag(FLAGS_data);
  if (options.data != kCountDataName) options.data = ResolvePath(options.data);
  options.json = ResolvePath(absl::GetFlag(FLAGS_json));
  options.save_init = ResolvePath(absl::GetFlag(FLAGS_save_init));
  options.init = ResolvePath(absl::GetFlag(FLAGS_init));
  options.save = ResolvePath(absl::GetFlag(FLAGS_save));
  options.save_every = absl::GetFlag(FLAGS_save_every);
  options.save_async = absl::GetFlag(FLAGS_save_async);
  options.keep_last = absl::GetFlag(FLAGS_keep_last);
  options.object_store = absl::GetFlag(FLAGS_object_store);
  options.resume = absl::GetFlag(FLAGS_resume);
  options.max_restarts = absl::GetFlag(FLAGS_max_restarts);
  options.restart_ranks = absl::GetFlag(FLAGS_restart_ranks);
  options.min_ranks = absl::GetFlag(FLAGS_min_ranks);
  options.replicas = absl::GetFlag(FLAGS_replicas);
  options.replica_history = ResolvePath(absl::GetFlag(FLAGS_replica_history));
  options.replica_replay = ResolvePath(absl::GetFlag(FLAGS_replica_replay));
  options.export_dir = ResolvePath(absl::GetFlag(FLAGS_export));
  options.trace = ResolvePath(absl::GetFlag(FLAGS_trace));
  options.trace_steps = absl::GetFlag(FLAGS_trace_steps);
  options.sample = absl::GetFlag(FLAGS_sample);
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
  absl::FlagsUsageConfig config;
  config.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "testing/gpt/flags/flags.cc");
  };
  absl::SetFlagsUsageConfig(config);
  const std::vector<char*> left = absl::ParseCommandLine(
      static_cast<int>(pointers.size()), pointers.data());
  if (left.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unexpected argument \"", left[1], "\": see --help for the flags"));
  }
  FSDP_ASSIGN_OR_RETURN(TrainOptions options, ReadFlags());
  FSDP_RETURN_IF_ERROR(CheckOptions(options));
  return options;
}

}  // namespace gpt
