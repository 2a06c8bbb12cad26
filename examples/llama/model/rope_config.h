// Which rotary position embedding a config.json asks for.
#ifndef EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_
#define EXAMPLES_LLAMA_MODEL_ROPE_CONFIG_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "base/json.h"

namespace llama {

// Llama 3.1's: wavelengths above original_max_position_embeddings /
// low_freq_factor tokens become `factor` times as long, those below
// original_max_position_embeddings / high_freq_factor stay, and those between
// become something between.
struct Llama3Scaling {
  double factor;
  double low_freq_factor;
  double high_freq_factor;  // above low_freq_factor
  int64_t original_max_position_embeddings;
};

struct RopeConfig {
  double theta = 10000.0;
  std::optional<Llama3Scaling> scaling;  // unset: type "default"
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
