// Which rotary position embedding a config.json asks for.
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

// Wavelengths become `factor` times as long:
struct RopeScaling {
  enum class Type {
    kLinear,   // all
    kDynamic,  // theta grows with a sequence that is longer than `tokens`
    kYarn,     // those that turn less than `low` times in `tokens`, not those
               // that turn more than `high` times (arXiv:2309.00071)
    kLlama3,   // those above `tokens` / `low`, and not those below `tokens` /
               // `high`
  };
  Type type;
  double factor;
  double low = 0;
  double high = 0;  // above `low`
  int64_t tokens = 0;
  double attention_factor = 1;  // of cosines and sines
};

struct RopeConfig {
  double theta = 10000.0;
  std::optional<RopeScaling> scaling;  // unset: type "default"
};

// From a whole config.json, an object: "rope_theta" and "rope_scaling", or
// "rope_parameters", as transformers 5 has it. `max_position_embeddings` stands
// in for an original_max_position_embeddings that is absent.
// Unimplemented: another type, or a parameter that we do not know of.
// InvalidArgument: a value that cannot be, or two that contradict each other.
absl::StatusOr<RopeConfig> ParseRopeConfig(const fsdp::Json& config,
                                           int64_t max_position_embeddings);

// Members of a JSON object, with what they may be.

// A member that is null counts as absent. Where one is absent, `otherwise` is
// returned, and without that it is an error. Errors are InvalidArgument, name
// the member and have what it is and what it may be.
class ConfigFields {
 public:
  // `object`, which outlives this, is one. `prefix` stands in front of names in
  // errors: "rope_scaling.".
  explicit ConfigFields(const fsdp::Json& object, std::string prefix = "");

  // Null where there is none.
  const fsdp::Json* Find(absl::string_view name) const;
  // Whether there is one, be it null.
  bool Has(absl::string_view name) const;

  // From `least` to 2^31 - 1, so that products of two fit.
  absl::StatusOr<int64_t> Integer(
      absl::string_view name, std::optional<int64_t> otherwise = std::nullopt,
      int64_t least = 1) const;
  // Above zero and finite.
  absl::StatusOr<double> Positive(
      absl::string_view name,
      std::optional<double> otherwise = std::nullopt) const;
  absl::StatusOr<bool> Bool(absl::string_view name, bool otherwise) const;
  absl::StatusOr<std::string> Text(
      absl::string_view name,
      std::optional<absl::string_view> otherwise = std::nullopt) const;

  // Unimplemented: "`name` is `what it is`: `supported`".
  absl::Status Unsupported(absl::string_view name,
                           absl::string_view supported) const;
  // InvalidArgument, in the same words.
  absl::Status Invalid(absl::string_view name,
                       absl::string_view expected) const;

 private:
  std::string Told(absl::string_view name, absl::string_view expected) const;

  const fsdp::Json& object_;
  const std::string prefix_;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_
