// Members of a JSON object, with what they may be.
#ifndef EXAMPLES_LLAMA_MODEL_CONFIG_FIELDS_H_
#define EXAMPLES_LLAMA_MODEL_CONFIG_FIELDS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/json.h"

namespace llama {

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

#endif  // EXAMPLES_LLAMA_MODEL_CONFIG_FIELDS_H_
