#include "planner/choose/step_costs.h"

#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

absl::Status CheckRate(absl::string_view name, double rate) {
  if (rate > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("StepCosts::", name, " is ", rate,
                   ": it has to be positive, or infinite"));
}

}  // namespace

absl::Status StepCosts::Validate() const {
  FSDP_RETURN_IF_ERROR(CheckRate("memory_bandwidth", memory_bandwidth));
  FSDP_RETURN_IF_ERROR(CheckRate("gather_bandwidth", gather_bandwidth));
  FSDP_RETURN_IF_ERROR(CheckRate("reduce_bandwidth", reduce_bandwidth));
  FSDP_RETURN_IF_ERROR(CheckRate("host_bandwidth", host_bandwidth));
  FSDP_RETURN_IF_ERROR(CheckRate("ssd_bandwidth", ssd_bandwidth));
  if (latency >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "StepCosts::latency is ", latency, ": it cannot be negative"));
}

std::string ToText(const StepCosts& costs) {
  return absl::StrFormat(
      "%.17g %.17g %.17g %.17g %.17g %.17g %d", costs.memory_bandwidth,
      costs.latency, costs.gather_bandwidth, costs.reduce_bandwidth,
      costs.host_bandwidth, costs.ssd_bandwidth, costs.overlaps ? 1 : 0);
}

absl::StatusOr<StepCosts> CostsFromText(absl::string_view text) {
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  StepCosts costs;
  double overlaps = 0;
  double* const numbers[] = {&costs.memory_bandwidth,
                             &costs.latency,
                             &costs.gather_bandwidth,
                             &costs.reduce_bandwidth,
                             &costs.host_bandwidth,
                             &costs.ssd_bandwidth,
                             &overlaps};
  bool ok = words.size() == std::size(numbers);
  for (size_t i = 0; ok && i < words.size(); ++i) {
    ok = absl::SimpleAtod(words[i], numbers[i]);
  }
  costs.overlaps = overlaps != 0;
  if (ok) return costs;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text.substr(0, 40), "\" are no costs of a step"));
}

}  // namespace fsdp
