#include "checkpoint/commit/checkpoint_names.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"

namespace fsdp::checkpoint {
namespace {

constexpr absl::string_view kPrefix = "step-";
constexpr absl::string_view kIncomplete = ".incomplete-";
constexpr absl::string_view kSuffixes[] = {"", kIncomplete, ".replaced",
                                           ".deleted"};

bool IsToken(absl::string_view text) {
  return !text.empty() &&
         text.find_first_not_of("0123456789abcdef") == text.npos;
}

}  // namespace

std::string StepName(int64_t step, Stage stage) {
  FSDP_CHECK(stage != Stage::kIncomplete);
  return absl::StrCat(kPrefix, step, kSuffixes[static_cast<int>(stage)]);
}

std::string StepPath(absl::string_view root, int64_t step, Stage stage) {
  return absl::StrCat(root, "/", StepName(step, stage));
}

std::string IncompletePath(absl::string_view root, int64_t step,
                           absl::string_view token) {
  FSDP_CHECK(IsToken(token));
  return absl::StrCat(root, "/", kPrefix, step, kIncomplete, token);
}

std::string WrittenPath(absl::string_view root, int64_t step,
                        absl::string_view token, CommitBy commit_by) {
  return commit_by == CommitBy::kManifest ? StepPath(root, step)
                                          : IncompletePath(root, step, token);
}

std::optional<StepFolder> ParseStepName(absl::string_view name) {
  absl::string_view digits = name;
  if (!absl::ConsumePrefix(&digits, kPrefix)) return std::nullopt;
  digits = digits.substr(0, digits.find('.'));
  absl::string_view suffix = name.substr(kPrefix.size() + digits.size());
  StepFolder found;
  if (!absl::SimpleAtoi(digits, &found.step) || found.step < 0 ||
      absl::StrCat(found.step) != digits) {
    return std::nullopt;
  }
  if (absl::ConsumePrefix(&suffix, kIncomplete)) {
    found.stage = Stage::kIncomplete;
    return IsToken(suffix) ? std::optional<StepFolder>(found) : std::nullopt;
  }
  for (const Stage stage :
       {Stage::kCommitted, Stage::kReplaced, Stage::kDeleted}) {
    found.stage = stage;
    if (suffix == kSuffixes[static_cast<int>(stage)]) return found;
  }
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
