// Which rotary position embedding a config.json asks for.
#ifndef EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_
#define EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
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

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_
