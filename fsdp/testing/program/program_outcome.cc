#include "fsdp/testing/program/program_outcome.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"

namespace fsdp::testing {

ProgramOutcome OutcomeOf(const absl::Status& status) {
  if (status.ok()) return {};
  const std::string text = status.ToString();
  if (absl::StrContains(text, "refused: ")) {
    return {ProgramOutcome::kRefused, text};
  }
  if (absl::StrContains(text, "differs: ")) {
    return {ProgramOutcome::kDiffers, text};
  }
  return {ProgramOutcome::kFails, text};
}

}  // namespace fsdp::testing
