// Continues a text or tokens with a Llama, Qwen2 or Qwen3.
//   bazel run //examples/llama:generate -- --help
//   bazel run --config=cuda //examples/llama:generate_cuda -- --device=cuda
#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/strings/substitute.h"
#include "absl/time/time.h"
#include "adapters/lora.h"
#include "base/command_line.h"
#include "base/device_graph.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/run_ranks/run_ranks.h"
#include "examples/llama/generation/generator.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/model.h"
#include "fsdp/deferred/deferred_init.h"

ABSL_FLAG(std::string, model, "",
          "The folder of a model, with its config.json (Llama, Qwen2 or "
          "Qwen3): a Hugging Face folder, what the program train has written "
          "with --export, or one of the folders step-N of its --save.");
ABSL_FLAG(std::string, adapter, "",
          "Merge the adapters in this folder into the model, which PEFT or "
          "the program train with --save_adapter has written for it.");
ABSL_FLAG(std::string, prompt, "",
          "The text to go on from, for models whose tokens are bytes. Prints "
          "text.");
ABSL_FLAG(std::string, tokens, "",
          "The tokens to go on from: 1,2,3, or - for those on standard input, "
          "with commas or white space between. Prints tokens, one a line, as "
          "they come.");
ABSL_FLAG(bool, batch, false,
          "With --tokens=-: each line of standard input is a prompt, and all "
          "are continued together. Prints a line for each at the end: 4,5,6.");
ABSL_FLAG(int64_t, max_tokens, 256,
          "Stop after so many tokens, if not before: behind a token that the "
          "eos_token_id of generation_config.json, or else of config.json, "
          "names, and at the model's max_position_embeddings. Each prompt is "
          "counted alone.");
ABSL_FLAG(double, temperature, llama::SamplingOptions().temperature,
          "Below 1, likely tokens become likelier. 0: always the likeliest.");
ABSL_FLAG(int64_t, top_k, llama::SamplingOptions().top_k,
          "Draw from only so many likeliest tokens; 0: from all.");
ABSL_FLAG(double, top_p, llama::SamplingOptions().top_p,
          "Draw from only the fewest likeliest tokens that are as probable "
          "together; 1: from all.");
ABSL_FLAG(uint64_t, seed, llama::SamplingOptions().seed, "Of what is drawn.");
ABSL_FLAG(std::string, precision, "fp32",
          "Parameters and what is computed: fp32 or, in half the memory, "
          "bf16. auto: bf16 on a GPU and on a CPU that multiplies it fast "
          "(AVX-512), else fp32.");
ABSL_FLAG(std::string, device, "cpu",
          "Where it computes: cpu, or cuda: the first GPU, which needs "
          "//examples/llama:generate_cuda, built with --config=cuda, and is "
          "fastest with --precision=bf16.");
ABSL_FLAG(std::string, base, "precision",
          "What the weights of linear layers but the head rest in. precision: "
          "what --precision says. int8: one byte for each, and numbers only "
          "while a layer computes, as the program train has them with the same "
          "flag; adapters stay beside them then.");
ABSL_FLAG(int, threads, 0, "Compute threads; 0: as many as LibTorch takes.");

namespace llama {
namespace {

using ::fsdp::ReadFlag;
using ::fsdp::ResolvePath;

constexpr char kUsage[] =
    "Continues a text or tokens with a Llama, Qwen2 or Qwen3, in one process, "
    "which needs memory for all of the model.\n\n"
    "  $0 --model=DIR --prompt=\"Once upon a time\"\n"
    "  tools/tokenize_text.py --encode \"Once upon a time\" --tokenizer DIR |\n"
    "      $0 --model=DIR --tokens=- |\n"
    "      tools/tokenize_text.py --decode --tokenizer DIR\n\n"
    "Prints what comes behind the prompt on standard output, and on standard "
    "error how fast it was.";

// The command line says these.
struct Flags {
  std::string model;
  std::string adapter;  // empty: none
  // One of these two is set.
  std::string prompt;
  std::string tokens;  // "-": from standard input
  bool batch;          // each line of it is a prompt
  int64_t max_tokens;
  SamplingOptions sampling;
  // Parameters and compute have this dtype; unset: one that is fast.
  std::optional<c10::ScalarType> precision;
  bool is_int8;  // the base's linear layers
  c10::DeviceType device;
  int threads;  // 0: as many as LibTorch chooses
};

absl::StatusOr<Flags> ReadFlags(int argc, char** argv) {
  const std::string program = std::filesystem::path(argv[0]).filename();
  FSDP_RETURN_IF_ERROR(fsdp::ParseFlags(
      argc, argv, absl::Substitute(kUsage, program), "llama/generate.cc"));
  constexpr int kMost = 1 << 30;  // more than any machine can compute
  Flags flags;
  flags.model = ResolvePath(absl::GetFlag(FLAGS_model));
  flags.adapter = ResolvePath(absl::GetFlag(FLAGS_adapter));
  flags.prompt = absl::GetFlag(FLAGS_prompt);
  flags.tokens = absl::GetFlag(FLAGS_tokens);
  flags.batch = absl::GetFlag(FLAGS_batch);
  flags.sampling.temperature = absl::GetFlag(FLAGS_temperature);
  flags.sampling.top_k = absl::GetFlag(FLAGS_top_k);
  flags.sampling.top_p = absl::GetFlag(FLAGS_top_p);
  flags.sampling.seed = absl::GetFlag(FLAGS_seed);
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_max_tokens, 1, kMost, flags.max_tokens));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_threads, 0, 1024, flags.threads));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_precision,
      {{"auto", std::nullopt}, {"fp32", c10::kFloat}, {"bf16", c10::kBFloat16}},
      flags.precision));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_base, {{"precision", false}, {"int8", true}}, flags.is_int8));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_device, {{"cpu", c10::kCPU}, {"cuda", c10::kCUDA}}, flags.device));
  if (flags.model.empty()) {
    return absl::InvalidArgumentError(
        "name the folder of a model: --model=DIR");
  }
  if (flags.prompt.empty() == flags.tokens.empty()) {
    return absl::InvalidArgumentError(
        "say what to go on from, either by --prompt=TEXT, for models whose "
        "tokens are bytes, or by --tokens=1,2,3");
  }
  if (flags.batch && flags.tokens != "-") {
    return absl::InvalidArgumentError(
        "--batch takes its prompts from standard input: add --tokens=-");
  }
  FSDP_RETURN_IF_ERROR(Check(flags.sampling));
  return flags;
}

// Returns InvalidArgument if the model's tokens are not bytes.
absl::Status CheckTokensAreBytes(const std::string& folder,
                                 const LlamaConfig& config) {
  constexpr int64_t kByteVocab = 256;
  if (config.vocab_size == kByteVocab) return absl::OkStatus();
  const std::string tokenizer = absl::StrCat(folder, "/tokenizer.json");
  std::error_code ignored;
  if (std::filesystem::exists(tokenizer, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--prompt is for models whose tokens are bytes, and there is ",
        tokenizer, ": tools/tokenize_text.py --encode TEXT --tokenizer ",
        folder, " makes tokens of a text, for --tokens=-"));
  }
  if (config.vocab_size > kByteVocab) {
    std::cerr << "there is no " << tokenizer
              << ": takes the prompt's bytes for tokens" << std::endl;
  }
  return absl::OkStatus();
}

// Loads a model of `config` from anything that fsdp::checkpoint::LoadModel()
// reads. Adapters are merged into it, but stay beside a base in int8.
absl::StatusOr<CausalLm> LoadWholeModel(const std::string& folder,
                                        const LlamaConfig& config,
                                        const std::string& adapter,
                                        const Flags& flags) {
  const c10::ScalarType dtype =
      DtypeOf(flags.precision, flags.device, &std::cerr);
  FSDP_ASSIGN_OR_RETURN(
      const c10::Device device,
      fsdp::comm::DeviceOfRank(flags.device, /*local_rank=*/0));
  CausalLm model = nullptr;
  FSDP_RETURN_IF_ERROR(
      fsdp::TorchToStatus("making the model", [&]() -> absl::Status {
        const fsdp::DeferredInit deferred;  // spends no time on random values
        model = CausalLm(config);
        model->to(dtype);
        if (flags.is_int8) {
          FSDP_RETURN_IF_ERROR(fsdp::adapters::QuantizeBase(*model));
        }
        MoveTo(device, *model);
        return absl::OkStatus();
      }));
  std::optional<fsdp::adapters::LoraConfig> lora;
  if (!adapter.empty()) {
    FSDP_ASSIGN_OR_RETURN(lora, fsdp::adapters::ReadLoraConfig(adapter));
    FSDP_RETURN_IF_ERROR(flags.is_int8
                             ? AddAdapters(*lora, *model)
                             : fsdp::adapters::AddLora(*model, *lora));
  }
  FSDP_RETURN_IF_ERROR(LoadBase(folder, config, *model));
  if (lora.has_value()) {
    FSDP_RETURN_IF_ERROR(fsdp::adapters::LoadAdapter(adapter, *model, *lora));
    if (!flags.is_int8) FSDP_RETURN_IF_ERROR(fsdp::adapters::MergeLora(*model));
  }
  model->eval();
  return model;
}

absl::StatusOr<Prompts> PromptsOf(const Flags& flags) {
  if (!flags.prompt.empty()) return Prompts{BytesOf(flags.prompt)};
  const std::string text =
      flags.tokens == "-"
          ? std::string(std::istreambuf_iterator<char>(std::cin), {})
          : flags.tokens;
  std::vector<absl::string_view> parts = {text};
  if (flags.batch) parts = absl::StrSplit(absl::StripSuffix(text, "\n"), '\n');
  Prompts prompts;
  for (const absl::string_view part : parts) {
    FSDP_ASSIGN_OR_RETURN(prompts.emplace_back(), ParseTokens(part));
  }
  return prompts;
}

absl::Status Write(const std::string& text) {
  if (std::cout << text << std::flush) return absl::OkStatus();
  return absl::DataLossError("standard output cannot be written");
}

std::string Rate(int64_t tokens, absl::Duration time) {
  const double seconds = absl::ToDoubleSeconds(time);
  return absl::StrFormat("%d tokens in %.2f s (%.4g tokens/s)", tokens, seconds,
                         static_cast<double>(tokens) / seconds);
}

void Report(const Prompts& prompts, const Generated& generated) {
  int64_t prompt_tokens = 0;
  for (const auto& prompt : prompts) {
    prompt_tokens += static_cast<int64_t>(prompt.size());
  }
  std::cerr << "prompt: " << Rate(prompt_tokens, generated.prompt_time)
            << ", which gives the first token\n";
  const auto firsts = static_cast<int64_t>(prompts.size());
  if (generated.tokens > firsts) {
    std::cerr << "then: " << Rate(generated.tokens - firsts, generated.time)
              << "\n";
  }
  const std::pair<Ending, const char*> reasons[] = {
      {Ending::kEos, "eos_token_id"},
      {Ending::kMaxTokens, "--max_tokens"},
      {Ending::kMaxPositions, "the model's max_position_embeddings"}};
  for (const auto& [ending, reason] : reasons) {
    const auto count = absl::c_count(generated.endings, ending);
    if (count == 0) continue;
    std::cerr << (firsts > 1 ? absl::StrCat(count, " ") : "") << "ended by "
              << reason << std::endl;
  }
}

absl::Status Run(const Flags& flags) {
  if (flags.threads > 0) at::set_num_threads(flags.threads);
  const bool is_text = !flags.prompt.empty();
  FSDP_ASSIGN_OR_RETURN(const Prompts prompts, PromptsOf(flags));
  std::string base = flags.model;
  std::string adapter = flags.adapter;
  if (HasAdaptersAlone(flags.model)) {
    if (!flags.adapter.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--adapter=", flags.adapter, " and --model=", flags.model,
          ", a checkpoint of adapters: leave --adapter away, or name the model "
          "that they are for"));
    }
    FSDP_ASSIGN_OR_RETURN(const auto lora,
                          fsdp::adapters::ReadLoraConfig(flags.model));
    base = lora.base_model;
    adapter = flags.model;
  }
  FSDP_ASSIGN_OR_RETURN(const LlamaConfig config, ReadConfig(base));
  if (is_text) {
    FSDP_RETURN_IF_ERROR(CheckTokensAreBytes(flags.model, config));
  }
  FSDP_RETURN_IF_ERROR(CheckPrompts(prompts, config));
  FSDP_ASSIGN_OR_RETURN(CausalLm model,
                        LoadWholeModel(base, config, adapter, flags));
  Prompts lines(flags.batch ? prompts.size() : 0);
  fsdp::DeviceGraphMaker make_graph;
#ifdef WITH_CUDA
  make_graph = fsdp::MakeCudaGraph;
#endif
  FSDP_ASSIGN_OR_RETURN(
      const Generated generated,
      Generate(*model, config, prompts, flags.max_tokens, flags.sampling,
               make_graph, [&](size_t prompt, int64_t token) {
                 if (flags.batch) {
                   lines[prompt].push_back(token);
                   return absl::OkStatus();
                 }
                 return Write(is_text ? TextOf(token)
                                      : absl::StrCat(token, "\n"));
               }));
  if (is_text) FSDP_RETURN_IF_ERROR(Write("\n"));
  for (const auto& line : lines) {
    FSDP_RETURN_IF_ERROR(Write(absl::StrJoin(line, ",") + "\n"));
  }
  Report(prompts, generated);
  return absl::OkStatus();
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
  const absl::StatusOr<llama::Flags> flags = llama::ReadFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status().message() << std::endl;
    return 2;
  }
  const absl::Status status = llama::Run(*flags);
  if (status.ok()) return 0;
  std::cerr << "generate: " << status.message() << std::endl;
  return 1;
}
