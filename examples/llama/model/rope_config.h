// Reads the rotary position embedding that a config.json asks for.
#ifndef EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_
#define EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/json.h"

namespace llama {

// A scaling makes some wavelengths `factor` times as long.
struct RopeScaling {
  enum class Type {
    kLinear,   // all
    kDynamic,  // none: theta grows with a sequence longer than `tokens`
    kYarn,     // those of pairs that turn less than `low` times in `tokens`,
               // not of those that turn more than `high` times
               // (arXiv:2309.00071)
    kLlama3,   // those above `tokens` / `low`, and not those below `tokens` /
               // `high`
  };
  Type type;
  double factor;
  double low = 0;
  double high = 0;  // above `low`
  int64_t tokens = 0;
  double attention_factor = 1;  // multiplies cosines and sines
};

struct RopeConfig {
  double theta = 10000.0;
  std::optional<RopeScaling> scaling;  // unset: type "default"
};

// Reads it from a whole config.json, an object: "rope_theta" and
// "rope_scaling", or "rope_parameters" as in transformers 5.
// `max_position_embeddings` replaces an absent
// original_max_position_embeddings. Unimplemented: another type, or an unknown
// parameter. InvalidArgument: an impossible value, or two that contradict each
// other.
absl::StatusOr<RopeConfig> ParseRopeConfig(const fsdp::Json& config,
                                           int64_t max_position_embeddings);

// The members of a JSON object, with checks. A member that is null counts as
// absent. For an absent member `otherwise` is returned; without `otherwise`
// that is an error. Errors are InvalidArgument, and name the member, its value
// and what it may be.
class ConfigFields {
 public:
  // `object` is an object and outlives this. `prefix` precedes names in errors:
  // "rope_scaling.".
  explicit ConfigFields(const fsdp::Json& object, std::string prefix = "");

  // Returns null if there is no such member.
  const fsdp::Json* Find(absl::string_view name) const;
  // Returns whether there is such a member, even if it is null.
  bool Has(absl::string_view name) const;

  // A value from `least` to 2^31 - 1, so that products of two fit.
  absl::StatusOr<int64_t> Integer(
      absl::string_view name, std::optional<int64_t> otherwise = std::nullopt,
      int64_t least = 1) const;
  // A value above zero and finite.
  absl::StatusOr<double> Positive(
      absl::string_view name,
      std::optional<double> otherwise = std::nullopt) const;
  absl::StatusOr<bool> Bool(absl::string_view name, bool otherwise) const;
  absl::StatusOr<std::string> Text(
      absl::string_view name,
      std::optional<absl::string_view> otherwise = std::nullopt) const;

  // Returns Unimplemented: "`name` is VALUE: `supported`".
  absl::Status Unsupported(absl::string_view name,
                           absl::string_view supported) const;
  // Returns InvalidArgument in the same words.
  absl::Status Invalid(absl::string_view name,
                       absl::string_view expected) const;

 private:
  std::string Told(absl::string_view name, absl::string_view expected) const;

  const fsdp::Json& object_;
  const std::string prefix_;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_
