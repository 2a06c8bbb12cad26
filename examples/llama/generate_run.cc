#include "examples/llama/generate_run.h"

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <filesystem>
#include <iterator>
#include <optional>
#include <system_error>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "adapters/lora.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/run_ranks/run_ranks.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/model.h"
#include "fsdp/deferred/deferred_init.h"

namespace llama {
namespace {

// Returns InvalidArgument if the model's tokens are not bytes.
absl::Status CheckTokensAreBytes(const std::string& folder,
                                 const LlamaConfig& config, std::ostream& log) {
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
    log << "there is no " << tokenizer << ": takes the prompt's bytes for "
        << "tokens" << std::endl;
  }
  return absl::OkStatus();
}

// Loads a model of `config` from anything that fsdp::checkpoint::LoadModel()
// reads. Adapters are merged into it, but stay beside a base in int8.
absl::StatusOr<CausalLm> LoadWholeModel(const std::string& folder,
                                        const LlamaConfig& config,
                                        const std::string& adapter,
                                        const GenerateFlags& flags,
                                        std::ostream& log) {
  const c10::ScalarType dtype = DtypeOf(flags.precision, flags.device, &log);
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

absl::StatusOr<Prompts> PromptsOf(const GenerateFlags& flags,
                                  std::istream& in) {
  if (!flags.prompt.empty()) return Prompts{BytesOf(flags.prompt)};
  const std::string text =
      flags.tokens == "-" ? std::string(std::istreambuf_iterator<char>(in), {})
                          : flags.tokens;
  std::vector<absl::string_view> parts = {text};
  if (flags.batch) parts = absl::StrSplit(absl::StripSuffix(text, "\n"), '\n');
  Prompts prompts;
  for (const absl::string_view part : parts) {
    FSDP_ASSIGN_OR_RETURN(prompts.emplace_back(), ParseTokens(part));
  }
  return prompts;
}

absl::Status Write(const std::string& text, std::ostream& out) {
  if (out << text << std::flush) return absl::OkStatus();
  return absl::DataLossError("standard output cannot be written");
}

std::string Rate(int64_t tokens, absl::Duration time) {
  const double seconds = absl::ToDoubleSeconds(time);
  return absl::StrFormat("%d tokens in %.2f s (%.4g tokens/s)", tokens, seconds,
                         static_cast<double>(tokens) / seconds);
}

absl::string_view Reason(Ending ending) {
  switch (ending) {
    case Ending::kEos:
      return "ended by eos_token_id";
    case Ending::kMaxTokens:
      return "ended by --max_tokens";
    case Ending::kMaxPositions:
      return "ended by the model's max_position_embeddings";
  }
  return "";
}

void Report(const Prompts& prompts, const Generated& generated,
            std::ostream& log) {
  int64_t prompt_tokens = 0;
  for (const auto& prompt : prompts) {
    prompt_tokens += static_cast<int64_t>(prompt.size());
  }
  log << "prompt: " << Rate(prompt_tokens, generated.prompt_time)
      << ", which gives the first token\n";
  const auto firsts = static_cast<int64_t>(prompts.size());
  if (generated.tokens > firsts) {
    log << "then: " << Rate(generated.tokens - firsts, generated.time) << "\n";
  }
  for (const Ending ending :
       {Ending::kEos, Ending::kMaxTokens, Ending::kMaxPositions}) {
    const auto count = absl::c_count(generated.endings, ending);
    if (count == 0) continue;
    log << (firsts > 1 ? absl::StrCat(count, " ") : "") << Reason(ending)
        << std::endl;
  }
}

}  // namespace

absl::Status RunGenerate(const GenerateFlags& flags, std::istream& in,
                         std::ostream& out, std::ostream& log,
                         const fsdp::DeviceGraphMaker& make_graph) {
  if (flags.threads > 0) at::set_num_threads(flags.threads);
  const bool is_text = !flags.prompt.empty();
  FSDP_ASSIGN_OR_RETURN(const Prompts prompts, PromptsOf(flags, in));
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
    FSDP_RETURN_IF_ERROR(CheckTokensAreBytes(flags.model, config, log));
  }
  FSDP_RETURN_IF_ERROR(CheckPrompts(prompts, config));
  FSDP_ASSIGN_OR_RETURN(CausalLm model,
                        LoadWholeModel(base, config, adapter, flags, log));
  Prompts lines(prompts.size());
  FSDP_ASSIGN_OR_RETURN(
      const Generated generated,
      Generate(*model, config, prompts, flags.max_tokens, flags.sampling,
               make_graph, [&](size_t prompt, int64_t token) {
                 if (flags.batch) {
                   lines[prompt].push_back(token);
                   return absl::OkStatus();
                 }
                 return Write(
                     is_text ? TextOf(token) : absl::StrCat(token, "\n"), out);
               }));
  if (is_text) FSDP_RETURN_IF_ERROR(Write("\n", out));
  for (const auto& line : lines) {
    if (!flags.batch) break;
    FSDP_RETURN_IF_ERROR(Write(absl::StrJoin(line, ",") + "\n", out));
  }
  Report(prompts, generated, log);
  return absl::OkStatus();
}

}  // namespace llama
