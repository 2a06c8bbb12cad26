#include "examples/llama/training/model.h"

#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>

#include <filesystem>
#include <iostream>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/options/options.h"

namespace llama {
namespace {

namespace fs = std::filesystem;

using ::fsdp::Json;

fsdp::Options ShardingOf(const LlamaConfig& config,
                         const ModelOptions& options) {
  fsdp::Options sharding;
  sharding.wrap_policy =
      config.tie_word_embeddings
          ? fsdp::WrapModules<DecoderLayerImpl>()
          : fsdp::WrapModules<DecoderLayerImpl, torch::nn::EmbeddingImpl,
                              HeadImpl>();
  if (options.compute != c10::kFloat) {
    sharding.unit.precision = fsdp::ComputeIn(options.compute);
  }
  // Where options are chosen, these are the units that may be recomputed.
  if (options.recompute || options.automatic.has_value()) {
    sharding.recompute.units = fsdp::WrapModules<DecoderLayerImpl>();
  }
  // Nothing but dropout draws random numbers, which captures cannot repeat.
  sharding.recompute.options.preserve_rng_state =
      options.lora.has_value() && options.lora->dropout > 0;
  sharding.offload = options.offload;
  return sharding;
}

absl::StatusOr<fsdp::Options> Choose(
    const std::shared_ptr<CausalLmImpl>& net, const LlamaConfig& config,
    const ModelOptions& options,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  fsdp::AutoOptions wanted = *options.automatic;
  wanted.loss = [&](int64_t rows) {
    const at::Tensor tokens =
        at::randint(config.vocab_size, {rows, options.seq},
                    at::TensorOptions(at::kLong).device(options.device));
    return net->forward(tokens, DocumentStarts(), tokens);
  };
  wanted.base = ShardingOf(config, options);
  FSDP_ASSIGN_OR_RETURN(const fsdp::AutoChoice choice,
                        fsdp::ChooseOptions(net, ranks, wanted));
  if (ranks->rank() == 0) std::cout << choice.ToString() << std::flush;
  return choice.options;
}

// Refuses sizes that the files cannot fill, before they cost memory and time:
// each number has at least a byte there.
absl::Status CheckFitsFiles(const LlamaConfig& config,
                            const std::string& folder) {
  double bytes = 0;
  std::error_code error;
  fs::directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    std::error_code no_file;
    const uintmax_t size = entry->file_size(no_file);
    if (!no_file) bytes += static_cast<double>(size);
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("listing ", folder));
  }
  const auto hidden = static_cast<double>(config.hidden_size);
  const double layer = 3 * static_cast<double>(config.intermediate_size);
  const double numbers =
      hidden * (static_cast<double>(config.num_hidden_layers) * layer +
                static_cast<double>(config.vocab_size));
  if (numbers <= bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "its sizes make a model of at least %.4g parameters, and all files "
      "beside it have %.4g bytes: fetch the model again, or take "
      "--from_scratch",
      numbers, bytes));
}

bool Has(const std::string& folder, const char* name) {
  std::error_code ignored;
  return fs::exists(absl::StrCat(folder, "/", name), ignored);
}

constexpr uintmax_t kMaxTextBytes = uintmax_t{64} << 20;

// Endings of files of weights and of their indices, ours and others'.
constexpr absl::string_view kEndingsOfWeights[] = {
    ".index.json", ".bin",  ".pt",   ".pth", ".ckpt",
    ".distcp",     ".gguf", ".onnx", ".h5",  ".msgpack"};
constexpr absl::string_view kOfOtherFolders[] = {
    "adapter_config.json", "manifest.json", "training.json"};

bool IsText(absl::string_view name) {
  return name[0] != '.' && !absl::StrContains(name, ".safetensors") &&
         !absl::c_linear_search(kOfOtherFolders, name) &&
         absl::c_none_of(kEndingsOfWeights, [name](absl::string_view ending) {
           return absl::EndsWith(name, ending);
         });
}

// Returns `config` with `dtype` as that of the weights, under the name that the
// member has there.
absl::StatusOr<std::string> WithDtype(const std::string& config,
                                      c10::ScalarType dtype) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(config));
  const auto* const members = json.As<Json::Object>();
  if (members == nullptr) {
    return absl::InvalidArgumentError("config.json is no JSON object");
  }
  const Json name(dtype == c10::kBFloat16 ? "bfloat16" : "float32");
  Json::Object changed = *members;
  bool found = false;
  for (auto& [key, value] : changed) {
    if (key != "torch_dtype" && key != "dtype") continue;
    value = name;
    found = true;
  }
  if (!found) changed.emplace_back("torch_dtype", name);
  return Json(std::move(changed)).ToString();
}

}  // namespace

void MoveTo(c10::Device device, torch::nn::Module& module) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = module.parameters();
  const std::vector<at::Tensor> buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() == device) continue;
    const at::Tensor moved = tensor.detach().to(device);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
  }
}

c10::ScalarType DtypeOf(std::optional<c10::ScalarType> asked,
                        c10::DeviceType device, std::ostream* log) {
  // oneDNN multiplies bfloat16 by instructions of AVX-512; without them
  // LibTorch takes up to hundreds of times longer than for float32.
  const bool is_fast =
      device != c10::DeviceType::CPU || at::get_cpu_capability() == "AVX512";
  if (!is_fast && asked == c10::kBFloat16 && log != nullptr) {
    *log << "--precision=bf16: this CPU has no AVX-512, and multiplies "
            "bfloat16 many times slower than float32: leave the flag away for "
            "fp32"
         << std::endl;
  }
  return asked.value_or(is_fast ? c10::kBFloat16 : c10::kFloat);
}

absl::Status AddAdapters(const fsdp::adapters::LoraConfig& lora,
                         CausalLmImpl& model) {
  FSDP_RETURN_IF_ERROR(fsdp::adapters::AddLora(model, lora));
  if (!model.named_parameters().contains("lm_head.lora_A.weight")) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "an adapter of lm_head, which computes with its own weight alone: take "
      "targets without it (an adapter with it can be merged: generate "
      "--adapter=DIR, without --base=int8)");
}

absl::StatusOr<Model> MakeModel(
    const LlamaConfig& config, const ModelOptions& options,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  std::shared_ptr<CausalLmImpl> net;
  FSDP_RETURN_IF_ERROR(
      fsdp::TorchToStatus("making the model", [&]() -> absl::Status {
        const fsdp::DeferredInit deferred;
        net = std::make_shared<CausalLmImpl>(config);
        InitializeParameters(*net, options.seed, config.initializer_range);
        if (options.lora.has_value()) {
          net->to(options.compute);
          if (options.int8_base.has_value()) {
            FSDP_RETURN_IF_ERROR(
                fsdp::adapters::QuantizeBase(*net, *options.int8_base));
          }
          FSDP_RETURN_IF_ERROR(AddAdapters(*options.lora, *net));
        }
        MoveTo(options.device, *net);
        return absl::OkStatus();
      }));
  fsdp::Options sharding = ShardingOf(config, options);
  if (options.automatic.has_value()) {
    FSDP_ASSIGN_OR_RETURN(sharding, Choose(net, config, options, ranks));
  } else {
    // Backward begins with the head, which is not gathered for that again.
    sharding.configure_unit = [](const std::string&,
                                 const torch::nn::Module& module,
                                 fsdp::UnitOptions& unit) {
      if (module.as<HeadImpl>() != nullptr) {
        unit.strategy = fsdp::ShardingStrategy::kShardGradOp;
      }
    };
  }
  if (options.loaded_later) {
    sharding.init.loaded_later = [](const std::string& name) {
      // Factors of adapters are initialized.
      return !absl::StrContains(name, ".lora_");
    };
  }
  return fsdp::FullyShard(std::move(net), ranks, sharding);
}

bool HasAdaptersAlone(const std::string& folder) {
  return Has(folder, "manifest.json") && Has(folder, "adapter_config.json");
}

absl::StatusOr<LlamaConfig> ReadConfig(const std::string& folder,
                                       bool from_scratch) {
  const std::string path = absl::StrCat(folder, "/config.json");
  if (HasAdaptersAlone(folder) ||
      (Has(folder, "adapter_config.json") && !Has(folder, "config.json"))) {
    return absl::InvalidArgumentError(absl::StrCat(
        folder,
        " has adapters alone: name it by --adapter, and by --model the model "
        "that they are for"));
  }
  const absl::StatusOr<std::string> text = fsdp::ReadRegularFile(path);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat(
        "there is no ", path, ": name a folder of a Hugging Face model"));
  }
  FSDP_RETURN_IF_ERROR(text.status());
  absl::StatusOr<LlamaConfig> config = ParseLlamaConfig(*text);
  absl::Status status = config.status();
  if (config.ok() && !from_scratch) status = CheckFitsFiles(*config, folder);
  if (!status.ok()) return fsdp::Annotate(status, path);
  const std::string of_generation =
      absl::StrCat(folder, "/generation_config.json");
  const absl::StatusOr<std::string> more = fsdp::ReadRegularFile(of_generation);
  if (absl::IsNotFound(more.status())) return config;
  status = more.ok() ? TakeGenerationConfig(*more, *config) : more.status();
  if (status.ok()) return config;
  return fsdp::Annotate(status, of_generation);
}

absl::Status LoadBase(const std::string& folder, const LlamaConfig& config,
                      torch::nn::Module& model) {
  fsdp::checkpoint::LoadModelOptions options;
  options.mapping =
      [tied = config.tie_word_embeddings,
       of_base = fsdp::adapters::OfBaseModel(model)](const std::string& name) {
        std::optional<fsdp::checkpoint::TensorRecipe> recipe = of_base(name);
        if (tied && name == "model.embed_tokens.weight") {
          recipe->copies = {"lm_head.weight"};
        }
        return recipe;
      };
  // Older files have the rotary frequencies, which follow from the config.
  options.ignored = [](const std::string& name) {
    return absl::EndsWith(name, ".self_attn.rotary_emb.inv_freq");
  };
  return fsdp::checkpoint::LoadModel(folder, model, options);
}

absl::StatusOr<std::map<std::string, std::string>> TextsBeside(
    const std::string& folder) {
  std::map<std::string, std::string> texts;
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename();
    std::error_code ignored;
    const uintmax_t size = entry->file_size(ignored);
    if (!IsText(name) || entry->is_directory(ignored) ||
        (entry->is_regular_file(ignored) && size > kMaxTextBytes)) {
      continue;
    }
    FSDP_ASSIGN_OR_RETURN(texts[name], fsdp::ReadRegularFile(entry->path()));
  }
  if (!error) return texts;
  return absl::ErrnoToStatus(error.value(), absl::StrCat("listing ", folder));
}

absl::Status ExportTrained(const std::string& folder,
                           std::map<std::string, std::string> texts,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters) {
  fsdp::checkpoint::ExportOptions options;
  options.dtype = dtype;
  FSDP_ASSIGN_OR_RETURN(texts["config.json"],
                        WithDtype(texts["config.json"], dtype));
  options.texts = std::move(texts);
  return has_adapters ? fsdp::adapters::ExportMerged(folder, *model, options)
                      : fsdp::checkpoint::ExportModel(folder, *model, options);
}

}  // namespace llama
