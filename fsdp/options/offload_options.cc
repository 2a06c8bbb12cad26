#include "fsdp/options/offload_options.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fsdp {
namespace {

absl::Status NotPositive(absl::string_view field, absl::string_view value) {
  return absl::InvalidArgumentError(
      absl::StrCat("offload: ", field, " is ", value,
                   ", which is not positive: leave it unset for its default"));
}

}  // namespace

const char* ToString(Tier tier) {
  static constexpr const char* kNames[] = {"device", "cpu", "ssd"};
  return kNames[static_cast<int>(tier)];
}

const char* ToString(RestingKind kind) {
  static constexpr const char* kNames[] = {"parameters", "gradients",
                                           "optimizer"};
  return kNames[static_cast<int>(kind)];
}

const char* ToString(StepOn step_on) {
  static constexpr const char* kNames[] = {"device", "host"};
  return kNames[static_cast<int>(step_on)];
}

Tier OffloadOptions::tier(RestingKind kind) const {
  return kind == RestingKind::kParameters  ? parameters
         : kind == RestingKind::kGradients ? gradients
                                           : optimizer;
}

absl::Status OffloadOptions::Validate() const {
  if (prefetch_distance < 0 || !(optimizer_state >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "offload: prefetch_distance ", prefetch_distance,
        " and optimizer_state ", optimizer_state, " must not be negative"));
  }
  if (memory_budget.has_value() && *memory_budget <= 0) {
    return NotPositive("memory_budget", absl::StrCat(*memory_budget));
  }
  if (buffer_bytes.has_value() && *buffer_bytes <= 0) {
    return NotPositive("buffer_bytes", absl::StrCat(*buffer_bytes));
  }
  if (timeout.has_value() && *timeout <= absl::ZeroDuration()) {
    return NotPositive("timeout", absl::FormatDuration(*timeout));
  }
  return absl::OkStatus();
}

}  // namespace fsdp
