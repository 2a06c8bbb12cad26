#include <cstddef>
#include <filesystem>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "adapters/lora.h"
#include "base/command_line.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "examples/llama/train_run.h"
#include "fsdp/options/offload_options.h"
#include "planner/choose/choose_options.h"

namespace llama {

constexpr double kLoraAlpha = 16;  // unless --lora_alpha says another

}  // namespace llama

ABSL_FLAG(std::string, model, "",
          "The folder of a Hugging Face model: config.json (Llama, Qwen2 or "
          "Qwen3) and safetensors files.");
ABSL_FLAG(bool, from_scratch, llama::TrainFlags().from_scratch,
          "Begin with random parameters: only config.json of --model is read.");
ABSL_FLAG(
    std::string, data, "",
    "What to train on: NAME.bin that tools/tokenize_text.py has made with "
    "the model's tokenizer, or any other file, whose bytes are tokens "
    "then.");
ABSL_FLAG(std::string, eval_data, "", "The same, to measure with.");
ABSL_FLAG(std::string, rows, "stream",
          "stream: the file is one text, cut into rows. packed: rows of whole "
          "documents, which do not see each other; for prompts and chats.");
ABSL_FLAG(int, ranks, llama::TrainFlags().ranks,
          "Ranks to start on this host. Under torchrun, Slurm and mpirun these "
          "decide instead.");
ABSL_FLAG(
    int, threads, llama::TrainFlags().threads,
    "Compute threads per rank; 0: OMP_NUM_THREADS, or else the cores that "
    "this host lets the process use divided among its "
    "ranks.");
ABSL_FLAG(int64_t, seq, llama::TrainFlags().seq, "Tokens per row.");
ABSL_FLAG(int64_t, batch, llama::TrainFlags().batch,
          "Rows of a backward, of all ranks together.");
ABSL_FLAG(int64_t, micro_batches, llama::TrainFlags().trainer.micro_batches,
          "Backwards per step, whose gradients are added up.");
ABSL_FLAG(bool, no_sync, llama::TrainFlags().trainer.no_sync,
          "Reduce gradients once per step instead of at every backward: less "
          "is sent, and each rank keeps all gradients whole meanwhile.");
ABSL_FLAG(int64_t, steps, llama::TrainFlags().trainer.schedule.steps,
          "Steps of the optimizer.");
ABSL_FLAG(uint64_t, seed, llama::TrainFlags().seed,
          "Of the order of the data and of what is random in the model.");
ABSL_FLAG(double, lr, llama::TrainFlags().trainer.learning_rate,
          "The highest learning rate.");
ABSL_FLAG(int64_t, warmup, llama::TrainFlags().trainer.schedule.warm_up,
          "Steps in which the learning rate rises to it.");
ABSL_FLAG(
    double, lr_floor, llama::TrainFlags().trainer.schedule.floor,
    "What it falls to, by half a cosine, as a part of --lr; 1: constant.");
ABSL_FLAG(double, weight_decay, llama::TrainFlags().trainer.weight_decay,
          "Of matrices; norms and biases do not decay.");
ABSL_FLAG(double, clip, llama::TrainFlags().trainer.max_grad_norm,
          "The longest gradient, of all parameters together; 0: any.");
ABSL_FLAG(
    std::string, device, "cpu",
    "Where the model is: cpu, or cuda: rank r of a host takes GPU r modulo "
    "their number. cuda needs //examples/llama:train_cuda, built with "
    "--config=cuda.");
ABSL_FLAG(std::string, precision, "auto",
          "bf16: compute and gather in it; parameters, optimizer and "
          "reductions are fp32, but for a base under adapters, which is bf16. "
          "fp32: all of it. auto: bf16 on a GPU and on a CPU that multiplies "
          "it fast (AVX-512), else fp32.");
ABSL_FLAG(bool, recompute, llama::TrainFlags().made.recompute,
          "Backward runs each layer again instead of keeping its activations.");
ABSL_FLAG(bool, auto, false,
          "Choose units, sharding, prefetching, recomputation and what rests "
          "elsewhere, so that a rank needs at most --auto_memory and a step "
          "takes as little time as that allows. Prints what was considered, "
          "and why it was not taken. Measures some steps first. Not with "
          "--recompute and --offload.");
ABSL_FLAG(double, auto_memory, 0,
          "With --auto: GiB of memory, the GPU's for a model there, that a "
          "rank may use for parameters, gradients, optimizer state, buffers "
          "and activations; the program and its data come on top.");
ABSL_FLAG(double, auto_host, 0,
          "With --auto on a GPU: GiB of the host's memory in which parameters, "
          "gradients and optimizer state of a rank may rest. --offload_dir "
          "lets --auto use files, too.");
ABSL_FLAG(std::string, offload, "none",
          "Where parameters, gradients and optimizer state rest while nothing "
          "computes with them: none (where the model is), cpu (memory of the "
          "host) or ssd (files); behind it, or instead, one of these for some "
          "kinds, as in ssd,gradients=none or optimizer=cpu. Losses have the "
          "same bits.");
ABSL_FLAG(double, offload_budget, 0,
          "With --offload: GiB of memory where the model is, for what rests "
          "there and for transfers. What fits stays, parameters first and "
          "optimizer state last; 0: nothing stays.");
ABSL_FLAG(std::string, offload_dir, "",
          "With ssd in --offload, and for --auto: a folder on a local SSD for "
          "files that vanish with the run.");
ABSL_FLAG(bool, capture, llama::TrainFlags().capture,
          "On a GPU: give it each step as one CUDA graph, so that it does not "
          "wait for the host. Not with --offload, --rows=packed and "
          "--skip_nonfinite: numbers that are not finite end the run behind "
          "the optimizer's step.");
ABSL_FLAG(int64_t, lora_rank, 0,
          "Train low-rank adapters (LoRA) of this rank, the rest frozen; 0: "
          "train everything.");
ABSL_FLAG(double, lora_alpha, llama::kLoraAlpha,
          "With --lora_rank: scale by alpha / rank.");
ABSL_FLAG(double, lora_dropout, 0, "With --lora_rank: of adapters' inputs.");
ABSL_FLAG(std::string, lora_targets, fsdp::adapters::kAllLinear,
          "With --lora_rank: the layers that get adapters, q_proj,v_proj for "
          "example.");
ABSL_FLAG(std::string, adapter, "",
          "Go on with the adapters in this folder, which PEFT or "
          "--save_adapter has written.");
ABSL_FLAG(std::string, base, "precision",
          "With --lora_rank or --adapter: what the frozen weights of linear "
          "layers rest in and are sent as. precision: what --precision says. "
          "int8: one byte for each, and numbers only while a layer computes "
          "(QLoRA).");
ABSL_FLAG(int64_t, base_block, fsdp::adapters::Int8Options().block,
          "With --base=int8: weights that share a scale of 4 bytes. Fewer are "
          "more exact.");
ABSL_FLAG(int64_t, log_every, llama::TrainFlags().log_every,
          "Steps between two lines of progress.");
ABSL_FLAG(int64_t, eval_every, llama::TrainFlags().eval_every,
          "With --eval_data: steps between two measurements; 0: only at the "
          "end.");
ABSL_FLAG(std::string, metrics, "",
          "Append a line of JSON for each step and measurement to this file.");
ABSL_FLAG(std::string, save, "",
          "Keep checkpoints in this folder, which other runs do not use: at "
          "the end, and as --save_every says. Any number of ranks reads them.");
ABSL_FLAG(int64_t, save_every, llama::TrainFlags().save_every,
          "With --save: also after each so many steps, beside the next ones.");
ABSL_FLAG(int64_t, keep_last, llama::TrainFlags().keep_last,
          "With --save: remove all but the newest so many; 0: keep all.");
ABSL_FLAG(std::string, resume, "false",
          "With --save: go on from the newest checkpoint; where there is none, "
          "begin (--resume), or end with an error (--resume=required). With as "
          "many ranks the steps are those of an unbroken run.");
ABSL_FLAG(int64_t, skip_nonfinite, llama::TrainFlags().skip_nonfinite,
          "Leave out at most so many steps in a row whose loss or gradients "
          "are not finite; the next one ends the run. 0: the first one does.");
ABSL_FLAG(int, max_restarts, llama::TrainFlags().max_restarts,
          "With --save --resume: start the ranks again when one has failed, at "
          "most so often.");
ABSL_FLAG(std::string, export, "",
          "Write the trained model to this new folder, for transformers, vLLM "
          "and whatever else reads such: bfloat16 with --precision=bf16. "
          "Adapters are merged into it; with --base=int8, into the weights of "
          "--model.");
ABSL_FLAG(std::string, save_adapter, "",
          "Write the trained adapters to this new folder, for PEFT.");

namespace llama {
namespace {

using ::fsdp::ReadFlag;
using ::fsdp::ResolvePath;

constexpr int kMost = 1 << 30;  // more than any machine can train

absl::Status Wrong(absl::string_view text) {
  return absl::InvalidArgumentError(text);
}

// Refuses adapters without a rank, where everything would be trained.
absl::Status ReadLora(const TrainFlags& flags,
                      std::optional<fsdp::adapters::LoraConfig>& result) {
  fsdp::adapters::LoraConfig lora;
  lora.rank = absl::GetFlag(FLAGS_lora_rank);
  lora.alpha = absl::GetFlag(FLAGS_lora_alpha);
  lora.dropout = absl::GetFlag(FLAGS_lora_dropout);
  const std::string targets = absl::GetFlag(FLAGS_lora_targets);
  if (lora.rank == 0) {
    const bool is_default = lora.alpha == kLoraAlpha && lora.dropout == 0 &&
                            targets == fsdp::adapters::kAllLinear;
    if (is_default) return absl::OkStatus();
    return Wrong(
        "--lora_alpha, --lora_dropout and --lora_targets need --lora_rank");
  }
  lora.targets = absl::StrSplit(targets, ',', absl::SkipEmpty());
  lora.base_model = flags.model;
  lora.task_type = "CAUSAL_LM";
  result = std::move(lora);
  return absl::OkStatus();
}

constexpr fsdp::RestingKind kKinds[] = {fsdp::RestingKind::kParameters,
                                        fsdp::RestingKind::kGradients,
                                        fsdp::RestingKind::kOptimizer};

// Parses none, cpu or ssd, or one of them for some of the kinds of memory, such
// as parameters=ssd,optimizer=cpu.
absl::StatusOr<fsdp::OffloadOptions> ParseOffload(absl::string_view text) {
  fsdp::OffloadOptions options;
  fsdp::Tier* const tiers[] = {&options.parameters, &options.gradients,
                               &options.optimizer};
  const std::map<absl::string_view, fsdp::Tier> names = {
      {"none", fsdp::Tier::kDevice},
      {"cpu", fsdp::Tier::kCpu},
      {"ssd", fsdp::Tier::kSsd}};
  std::set<absl::string_view> said;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const size_t equals = part.find('=');
    const bool is_for_all = equals == part.npos;
    const absl::string_view kind = is_for_all ? "" : part.substr(0, equals);
    const auto name = names.find(is_for_all ? part : part.substr(equals + 1));
    bool is_known = false;
    for (size_t i = 0; i < 3 && name != names.end(); ++i) {
      // A tier for all may come first, before those of single kinds.
      if (is_for_all ? !said.empty() : kind != fsdp::ToString(kKinds[i])) {
        continue;
      }
      *tiers[i] = name->second;
      is_known = true;
    }
    if (said.insert(kind).second && is_known) continue;
    return Wrong(absl::StrCat(
        "--offload=", text,
        ": expected none, cpu or ssd, and behind it, or instead, one of these "
        "for each of parameters, gradients and optimizer at most once, as in "
        "parameters=ssd,optimizer=cpu"));
  }
  return options;
}

// Sets bytes from a number of GiB.
absl::Status ReadGib(const absl::Flag<double>& flag, int64_t& bytes) {
  double gib = 0;
  FSDP_RETURN_IF_ERROR(ReadFlag(flag, 0, 1e6, gib));
  bytes = static_cast<int64_t>(gib * double{1 << 30});
  return absl::OkStatus();
}

// Reads what the model is made with.
absl::Status ReadModelOptions(TrainFlags& flags) {
  ModelOptions& made = flags.made;
  made.recompute = absl::GetFlag(FLAGS_recompute);
  FSDP_RETURN_IF_ERROR(ReadLora(flags, made.lora));
  bool is_int8 = false;
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_base, {{"precision", false}, {"int8", true}}, is_int8));
  fsdp::adapters::Int8Options int8;
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_base_block, 1, kMost, int8.block));
  if (is_int8) made.int8_base = int8;
  fsdp::AutoOptions automatic;
  FSDP_RETURN_IF_ERROR(ReadGib(FLAGS_auto_memory, automatic.memory_bytes));
  FSDP_RETURN_IF_ERROR(ReadGib(FLAGS_auto_host, automatic.host_bytes));
  if (absl::GetFlag(FLAGS_auto)) made.automatic = automatic;
  FSDP_ASSIGN_OR_RETURN(made.offload,
                        ParseOffload(absl::GetFlag(FLAGS_offload)));
  made.offload.directory = ResolvePath(absl::GetFlag(FLAGS_offload_dir));
  int64_t budget = 0;
  FSDP_RETURN_IF_ERROR(ReadGib(FLAGS_offload_budget, budget));
  if (budget > 0) made.offload.memory_budget = budget;
  return absl::OkStatus();
}

absl::StatusOr<TrainFlags> ReadAll() {
  TrainFlags flags;
  flags.model = ResolvePath(absl::GetFlag(FLAGS_model));
  flags.from_scratch = absl::GetFlag(FLAGS_from_scratch);
  flags.data = ResolvePath(absl::GetFlag(FLAGS_data));
  flags.eval_data = ResolvePath(absl::GetFlag(FLAGS_eval_data));
  flags.seed = absl::GetFlag(FLAGS_seed);
  flags.capture = absl::GetFlag(FLAGS_capture);
  flags.adapter = ResolvePath(absl::GetFlag(FLAGS_adapter));
  flags.metrics = ResolvePath(absl::GetFlag(FLAGS_metrics));
  flags.save = ResolvePath(absl::GetFlag(FLAGS_save));
  flags.export_dir = ResolvePath(absl::GetFlag(FLAGS_export));
  flags.save_adapter = ResolvePath(absl::GetFlag(FLAGS_save_adapter));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_rows, {{"stream", false}, {"packed", true}}, flags.packed));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_device, {{"cpu", c10::kCPU}, {"cuda", c10::kCUDA}}, flags.device));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_precision,
      {{"auto", std::nullopt}, {"fp32", c10::kFloat}, {"bf16", c10::kBFloat16}},
      flags.precision));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_resume,
                                {{"true", Resume::kIfThere},
                                 {"false", Resume::kNo},
                                 {"required", Resume::kRequired}},
                                flags.resume));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_ranks, 1, 1024, flags.ranks));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_threads, 0, 1024, flags.threads));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_seq, 1, kMost, flags.seq));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_batch, 1, kMost, flags.batch));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_log_every, 1, kMost, flags.log_every));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_eval_every, 0, kMost, flags.eval_every));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_save_every, 0, kMost, flags.save_every));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_keep_last, 0, kMost, flags.keep_last));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_skip_nonfinite, 0, kMost, flags.skip_nonfinite));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_max_restarts, 0, kMost, flags.max_restarts));
  TrainerOptions& trainer = flags.trainer;
  trainer.no_sync = absl::GetFlag(FLAGS_no_sync);
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_micro_batches, 1, kMost, trainer.micro_batches));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_steps, 1, kMost, trainer.schedule.steps));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_warmup, 0, kMost, trainer.schedule.warm_up));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_lr_floor, 0, 1, trainer.schedule.floor));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_lr, 0, 1e3, trainer.learning_rate));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_weight_decay, 0, 1e3, trainer.weight_decay));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_clip, 0, 1e9, trainer.max_grad_norm));
  FSDP_RETURN_IF_ERROR(ReadModelOptions(flags));
  return flags;
}

// Requires that the folders to write are different and not inside each other.
absl::Status CheckFolders(const TrainFlags& flags) {
  const std::pair<const char*, std::string> folders[] = {
      {"save", flags.save},
      {"export", flags.export_dir},
      {"save_adapter", flags.save_adapter}};
  const auto normal = [](const std::string& path) {
    return std::filesystem::path(path + "/").lexically_normal().string();
  };
  for (const auto& [name, path] : folders) {
    for (const auto& [other, inside] : folders) {
      if (name == other || path.empty() || inside.empty()) continue;
      if (!absl::StartsWith(normal(inside), normal(path))) continue;
      return Wrong(absl::StrCat("--", other, "=", inside, " and --", name, "=",
                                path, ": take folders of their own"));
    }
  }
  return absl::OkStatus();
}

// Refuses flags that need or exclude others.
absl::Status Check(const TrainFlags& flags) {
  const ModelOptions& made = flags.made;
  const fsdp::OffloadOptions& offload = made.offload;
  const bool automatic = made.automatic.has_value();
  const bool has_host = absl::GetFlag(FLAGS_auto_host) > 0;
  const bool on_cpu = flags.device == c10::DeviceType::CPU;
  const bool on_ssd = absl::c_any_of(kKinds, [&](fsdp::RestingKind kind) {
    return offload.tier(kind) == fsdp::Tier::kSsd;
  });
  const bool has_adapters = made.lora.has_value() || !flags.adapter.empty();
  const bool is_int8 = made.int8_base.has_value();
  const std::pair<bool, const char*> refused[] = {
      {automatic != (absl::GetFlag(FLAGS_auto_memory) > 0),
       "--auto needs --auto_memory=GIB, which is for --auto alone"},
      {has_host && !automatic,
       "--auto_host is for --auto alone: --offload=cpu says what rests in the "
       "host's memory"},
      {has_host && on_cpu,
       "--auto_host without --device=cuda: the model is in the host's memory "
       "already; --offload_dir lets --auto use files"},
      {automatic && made.recompute,
       "--auto with --recompute, which it chooses itself: leave one of them "
       "away"},
      {automatic && offload.any(),
       "--auto with --offload, which it chooses itself: leave one of them "
       "away"},
      {offload.memory_budget.has_value() && !offload.any(),
       "--offload_budget without --offload: say where to, by --offload=cpu or "
       "--offload=ssd"},
      {on_ssd && offload.directory.empty(),
       "--offload to ssd needs --offload_dir=DIR, a folder on a local SSD, for "
       "files that vanish with the run"},
      {!on_ssd && !automatic && !offload.directory.empty(),
       "--offload_dir without ssd in --offload, and without --auto: nothing "
       "would lie there"},
      {flags.capture && on_cpu,
       "--capture needs --device=cuda: there a host queues work, which a graph "
       "saves"},
      {flags.capture &&
           (offload.any() || !offload.directory.empty() || has_host),
       "--capture with --offload, --offload_dir or --auto_host: the host moves "
       "what rests elsewhere"},
      {flags.capture && flags.packed,
       "--capture with --rows=packed, whose documents begin elsewhere in each "
       "step: take --rows=stream"},
      {flags.capture && flags.skip_nonfinite > 0,
       "--capture with --skip_nonfinite: a captured step is looked at when the "
       "optimizer has made it"},
      {flags.model.empty(), "name the folder of a model: --model=DIR"},
      {flags.data.empty(), "name what to train on: --data=FILE"},
      {flags.eval_every > 0 && flags.eval_data.empty(),
       "--eval_every needs --eval_data"},
      {flags.save.empty() && (flags.resume != Resume::kNo ||
                              flags.save_every > 0 || flags.max_restarts > 0),
       "--resume, --save_every and --max_restarts need --save"},
      {flags.max_restarts > 0 && flags.resume != Resume::kIfThere,
       "--max_restarts needs --resume, as the first start may have no "
       "checkpoint"},
      {!flags.save_adapter.empty() && !has_adapters,
       "--save_adapter needs --lora_rank or --adapter"},
      {made.lora.has_value() && !flags.adapter.empty(),
       "--lora_rank and --adapter: an adapter has its own rank"},
      {is_int8 && !has_adapters, "--base=int8 needs --lora_rank or --adapter"},
      {is_int8 && flags.from_scratch,
       "--base=int8 and --from_scratch: the base is frozen, and has to come "
       "from files"},
      {is_int8 && !flags.export_dir.empty() && flags.save_adapter.empty(),
       "--base=int8 and --export need --save_adapter: what it writes is merged "
       "into the weights of --model"}};
  for (const auto& [is_refused, why] : refused) {
    if (is_refused) return Wrong(why);
  }
  FSDP_RETURN_IF_ERROR(CheckFolders(flags));
  return made.lora.has_value() ? fsdp::adapters::Check(*made.lora)
                               : absl::OkStatus();
}

}  // namespace

absl::StatusOr<TrainFlags> ReadTrainFlags(int argc, char** argv) {
  // A flag that is text needs a value, but --resume may stand alone.
  static char resume[] = "--resume=true";
  static char no_resume[] = "--resume=false";
  std::vector<char*> arguments(argv, argv + argc);
  for (char*& argument : arguments) {
    if (argument == absl::string_view("--resume")) argument = resume;
    if (argument == absl::string_view("--noresume")) argument = no_resume;
  }
  const std::string program = std::filesystem::path(argv[0]).filename();
  FSDP_RETURN_IF_ERROR(fsdp::ParseFlags(
      argc, arguments.data(),
      absl::StrCat(
          "Trains a Llama, Qwen2 or Qwen3 from Hugging Face files, sharded "
          "over ranks.\n\n  ",
          program, " --model=DIR --data=FILE --export=DIR"),
      "train_flags.cc"));
  FSDP_ASSIGN_OR_RETURN(const TrainFlags flags, ReadAll());
  FSDP_RETURN_IF_ERROR(Check(flags));
  return flags;
}

}  // namespace llama
