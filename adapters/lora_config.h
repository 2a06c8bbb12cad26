// The low-rank adapters that a model gets, in the form that Python's PEFT
// writes to adapter_config.json.
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
  // Scales by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023,
  // arXiv:2312.03732).
  bool rank_stabilized = false;
  // Names of layers, or the ends of names: "q_proj" matches
  // "model.layers.0.self_attn.q_proj". kAllLinear alone means all but
  // "lm_head".
  std::vector<std::string> targets = {};
  // A regular expression of layers' complete names, instead of `targets`.
  std::string target_pattern = {};
  // Restricts `targets` to layers of these numbers, except complete names;
  // empty: no restriction.
  std::vector<int64_t> layers = {};
  // Other ranks and alphas for some layers. The first expression that matches a
  // layer's name, or the end of it, decides.
  std::vector<std::pair<std::string, double>> ranks = {};
  std::vector<std::pair<std::string, double>> alphas = {};
  // Modules that are trained whole; names as in `targets`.
  std::vector<std::string> trained_whole = {};
  // For readers of the file: where the base model comes from, and what PEFT
  // takes it for ("CAUSAL_LM" if transformers generates with it).
  std::string base_model = {};
  std::string task_type = {};

  double Scale() const;
  // Returns whether `name` is a target's; not for kAllLinear.
  bool IsTarget(absl::string_view name) const;
  // Returns this configuration with that layer's rank and alpha.
  LoraConfig Of(absl::string_view layer) const;
};

inline constexpr char kAllLinear[] = "all-linear";

// Returns whether one of `names` is the module's name or the end of it.
bool IsNamedBy(absl::string_view name, const std::vector<std::string>& names);

// InvalidArgument: the rank is below 1, dropout is not in [0, 1), the scale is
// not finite, there are no targets, or an expression is invalid.
absl::Status Check(const LoraConfig& config);

// Parses PEFT's JSON. InvalidArgument: it is not such JSON, a number is
// impossible, or a feature that it names is missing here and would change the
// result (DoRA, trained biases and so on).
absl::StatusOr<LoraConfig> ParseLoraConfig(absl::string_view json);
std::string ToJson(const LoraConfig& config);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LORA_CONFIG_H_
