#include "testing/gpt/flags/offload_flags.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace gpt {
namespace {

using ::fsdp::RestingKind;
using ::fsdp::Tier;

constexpr std::array<RestingKind, fsdp::kNumRestingKinds> kKinds = {
    RestingKind::kParameters, RestingKind::kGradients, RestingKind::kOptimizer};

struct Unit {
  absl::string_view suffix;
  int64_t bytes;
};
constexpr std::array<Unit, 3> kUnits = {Unit{"GiB", int64_t{1} << 30},
                                        Unit{"MiB", int64_t{1} << 20},
                                        Unit{"KiB", int64_t{1} << 10}};

std::string TemporaryDirectory() {
  std::error_code error;
  const std::filesystem::path path =
      std::filesystem::temp_directory_path(error);
  return error ? "/tmp" : path.string();
}

}  // namespace

bool AbslParseFlag(absl::string_view text, OffloadTier* tier,
                   std::string* error) {
  for (const Tier each : {Tier::kDevice, Tier::kCpu, Tier::kSsd}) {
    if (text != AbslUnparseFlag(OffloadTier{each})) continue;
    tier->tier = each;
    return true;
  }
  *error = "expected none, cpu or ssd";
  return false;
}

std::string AbslUnparseFlag(OffloadTier tier) {
  return tier.tier == Tier::kDevice ? "none" : fsdp::ToString(tier.tier);
}

bool AbslParseFlag(absl::string_view text, OffloadKinds* kinds,
                   std::string* error) {
  kinds->chosen.fill(false);
  for (const absl::string_view name : absl::StrSplit(text, ',')) {
    const auto* kind = std::find_if(
        kKinds.begin(), kKinds.end(),
        [name](RestingKind each) { return name == fsdp::ToString(each); });
    if (kind == kKinds.end()) {
      *error = absl::StrCat("\"", name,
                            "\" is none of parameters, gradients and "
                            "optimizer, which are separated by commas");
      return false;
    }
    kinds->chosen[static_cast<int>(*kind)] = true;
  }
  return true;
}

std::string AbslUnparseFlag(const OffloadKinds& kinds) {
  std::vector<std::string> names;
  for (const RestingKind kind : kKinds) {
    if (kinds.chosen[static_cast<int>(kind)]) {
      names.emplace_back(fsdp::ToString(kind));
    }
  }
  return absl::StrJoin(names, ",");
}

bool AbslParseFlag(absl::string_view text, ByteCount* count,
                   std::string* error) {
  int64_t scale = 1;
  for (const Unit& unit : kUnits) {
    if (absl::ConsumeSuffix(&text, unit.suffix)) {
      scale = unit.bytes;
      break;
    }
  }
  if (!absl::SimpleAtoi(text, &count->bytes) || count->bytes < 0 ||
      count->bytes > std::numeric_limits<int64_t>::max() / scale) {
    *error = "expected a number of bytes, such as 8GiB, 512MiB, 64KiB or 4096";
    return false;
  }
  count->bytes *= scale;
  return true;
}

std::string AbslUnparseFlag(ByteCount count) {
  for (const Unit& unit : kUnits) {
    if (count.bytes > 0 && count.bytes % unit.bytes == 0) {
      return absl::StrCat(count.bytes / unit.bytes, unit.suffix);
    }
  }
  return absl::StrCat(count.bytes);
}

absl::StatusOr<fsdp::OffloadOptions> ToOffloadOptions(
    const OffloadFlags& flags) {
  fsdp::OffloadOptions options;
  if (flags.tier.tier == Tier::kDevice) {
    if (flags.automatic) options.directory = flags.directory;
    std::string useless;
    if (flags.memory_budget.bytes > 0) {
      useless = absl::StrCat("--memory-budget=",
                             AbslUnparseFlag(flags.memory_budget));
    } else if (flags.kinds.chosen != OffloadKinds().chosen) {
      useless = absl::StrCat("--offload-kinds=", AbslUnparseFlag(flags.kinds));
    } else if (!flags.directory.empty() && !flags.automatic) {
      useless = absl::StrCat("--offload-dir=", flags.directory);
    } else if (!flags.keep.empty()) {
      useless = absl::StrCat("--keep=", flags.keep);
    }
    if (useless.empty()) return options;
    return absl::InvalidArgumentError(absl::StrCat(
        useless, " without --offload: say where to, by --offload=ssd"));
  }
  const auto tier_of = [&flags](RestingKind kind) {
    return flags.kinds.chosen[static_cast<int>(kind)] ? flags.tier.tier
                                                      : Tier::kDevice;
  };
  options.parameters = tier_of(RestingKind::kParameters);
  options.gradients = tier_of(RestingKind::kGradients);
  options.optimizer = tier_of(RestingKind::kOptimizer);
  if (flags.memory_budget.bytes > 0) {
    options.memory_budget = flags.memory_budget.bytes;
  }
  options.keep = !flags.keep.empty();
  options.name = flags.keep;
  options.directory =
      flags.directory.empty() ? TemporaryDirectory() : flags.directory;
  return options;
}

}  // namespace gpt
