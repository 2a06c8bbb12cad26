#include "checkpoint/commit/checkpoint_names.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace fsdp::checkpoint {
namespace {

constexpr absl::string_view kPrefix = "step-";
constexpr absl::string_view kSuffixes[] = {"", ".incomplete", ".replaced",
                                           ".deleted"};

}  // namespace

std::string StepName(int64_t step, Stage stage) {
  return absl::StrCat(kPrefix, step, kSuffixes[static_cast<int>(stage)]);
}

std::string StepPath(absl::string_view root, int64_t step, Stage stage) {
  return absl::StrCat(root, "/", StepName(step, stage));
}

std::optional<StepFolder> ParseStepName(absl::string_view name) {
  absl::string_view digits = name;
  if (!absl::ConsumePrefix(&digits, kPrefix)) return std::nullopt;
  digits = digits.substr(0, digits.find('.'));
  StepFolder found;
  if (!absl::SimpleAtoi(digits, &found.step) || found.step < 0) {
    return std::nullopt;
  }
  for (const Stage stage : {Stage::kCommitted, Stage::kIncomplete,
                            Stage::kReplaced, Stage::kDeleted}) {
    found.stage = stage;
    if (StepName(found.step, stage) == name) return found;
  }
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
