// What low-rank adapters a model gets, as Python's PEFT writes it down in
// adapter_config.json.
#ifndef ADAPTERS_LORA_CONFIG_H_
#define ADAPTERS_LORA_CONFIG_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::adapters {

struct LoraConfig {
  int64_t rank = 8;
  double alpha = 8;
  double dropout = 0;
  // Scale by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023,
  // arXiv:2312.03732).
  bool rank_stabilized = false;
  // Layers by their names or the ends of these, "q_proj" for
  // "model.layers.0.self_attn.q_proj"; kAllLinear alone: all but "lm_head".
  std::vector<std::string> targets = {};
  // Instead: a regular expression of their whole names.
  std::string target_pattern = {};
  // Of the targets only those in layers of these numbers; empty: all.
  std::vector<int64_t> layers = {};
  // Other ranks and alphas: of layers whose names, or the ends of these, an
  // expression matches, the first one that does.
  std::vector<std::pair<std::string, double>> ranks = {};
  std::vector<std::pair<std::string, double>> alphas = {};
  // Modules that are trained whole, by the rule of `targets`.
  std::vector<std::string> trained_whole = {};
  // For those who read the file: where the base model comes from, and what
  // PEFT is to take it for, "CAUSAL_LM" where transformers generates by it.
  std::string base_model = {};
  std::string task_type = {};

  double Scale() const;
  // Whether the module of that name is one of the targets, unless they are
  // kAllLinear.
  bool IsTarget(absl::string_view name) const;
  // With the rank and alpha of that layer.
  LoraConfig Of(absl::string_view layer) const;
};

inline constexpr char kAllLinear[] = "all-linear";

// Whether a module of that name is one of `names`.
bool IsNamedBy(absl::string_view name, const std::vector<std::string>& names);

// InvalidArgument: a rank below 1, dropout outside [0, 1), a scale that is not
// finite, no targets, an expression that is none.
absl::Status Check(const LoraConfig& config);

// InvalidArgument: no such JSON; numbers that cannot be; what would compute
// something else and is not there (DoRA, biases that are trained and so on), by
// its name.
absl::StatusOr<LoraConfig> ParseLoraConfig(absl::string_view json);
std::string ToJson(const LoraConfig& config);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LORA_CONFIG_H_
