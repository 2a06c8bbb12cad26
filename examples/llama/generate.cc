// Continues a text or tokens with a Llama, Qwen2 or Qwen3.
//   bazel run //examples/llama:generate -- --help
//   bazel run --config=cuda //examples/llama:generate_cuda -- --device=cuda
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/substitute.h"
#include "base/command_line.h"
#include "base/device_graph.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "examples/llama/generate_run.h"
#include "examples/llama/generation/generator.h"

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
ABSL_FLAG(bool, batch, llama::GenerateFlags().batch,
          "With --tokens=-: each line of standard input is a prompt, and all "
          "are continued together. Prints a line for each at the end: 4,5,6.");
ABSL_FLAG(int64_t, max_tokens, llama::GenerateFlags().max_tokens,
          "Stop after so many tokens, if not before: behind a token that the "
          "config's eos_token_id names, and at its max_position_embeddings. "
          "Each prompt is counted alone.");
ABSL_FLAG(double, temperature, llama::GenerateFlags().sampling.temperature,
          "Below 1, likely tokens become likelier. 0: always the likeliest.");
ABSL_FLAG(int64_t, top_k, llama::GenerateFlags().sampling.top_k,
          "Draw from only so many likeliest tokens; 0: from all.");
ABSL_FLAG(double, top_p, llama::GenerateFlags().sampling.top_p,
          "Draw from only the fewest likeliest tokens that are as probable "
          "together; 1: from all.");
ABSL_FLAG(uint64_t, seed, llama::GenerateFlags().sampling.seed,
          "Of what is drawn.");
ABSL_FLAG(std::string, precision, "fp32",
          "Parameters and what is computed: fp32 or, in half the memory, "
          "bf16.");
ABSL_FLAG(std::string, device, "cpu",
          "Where it computes: cpu, or cuda: the first GPU, which needs "
          "//examples/llama:generate_cuda, built with --config=cuda, and is "
          "fastest with --precision=bf16.");
ABSL_FLAG(std::string, base, "precision",
          "What the weights of linear layers but the head rest in. precision: "
          "what --precision says. int8: one byte for each, and numbers only "
          "while a layer computes, as the program train has them with the same "
          "flag; adapters stay beside them then.");
ABSL_FLAG(int, threads, llama::GenerateFlags().threads,
          "Compute threads; 0: as many as LibTorch takes.");

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

absl::StatusOr<GenerateFlags> ReadAll() {
  constexpr int kMost = 1 << 30;  // more than any machine can compute
  GenerateFlags flags;
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
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_threads, 0, kMost, flags.threads));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_precision,
      {{"auto", std::nullopt}, {"fp32", c10::kFloat}, {"bf16", c10::kBFloat16}},
      flags.precision));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_base, {{"precision", false}, {"int8", true}}, flags.is_int8));
  FSDP_RETURN_IF_ERROR(ReadFlag(
      FLAGS_device, {{"cpu", c10::kCPU}, {"cuda", c10::kCUDA}}, flags.device));
  return flags;
}

absl::Status Check(const GenerateFlags& flags) {
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
  return Check(flags.sampling);
}

absl::StatusOr<GenerateFlags> ReadFlags(int argc, char** argv) {
  const std::string program = std::filesystem::path(argv[0]).filename();
  FSDP_RETURN_IF_ERROR(fsdp::ParseFlags(
      argc, argv, absl::Substitute(kUsage, program), "llama/generate.cc"));
  FSDP_ASSIGN_OR_RETURN(const GenerateFlags flags, ReadAll());
  FSDP_RETURN_IF_ERROR(Check(flags));
  return flags;
}

int Main(int argc, char** argv) {
  const absl::StatusOr<GenerateFlags> flags = ReadFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status().message() << std::endl;
    return 2;
  }
  fsdp::DeviceGraphMaker make_graph;
#ifdef WITH_CUDA
  make_graph = fsdp::MakeCudaGraph;
#endif
  const absl::Status status =
      RunGenerate(*flags, std::cin, std::cout, std::cerr, make_graph);
  if (status.ok()) return 0;
  std::cerr << "generate: " << status.message() << std::endl;
  return 1;
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) { return llama::Main(argc, argv); }
