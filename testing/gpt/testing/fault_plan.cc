#include "testing/gpt/testing/fault_plan.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace gpt {
namespace {

constexpr std::pair<absl::string_view, FaultKind> kKinds[] = {
    {"kill", FaultKind::kKill},   {"stop", FaultKind::kStop},
    {"segv", FaultKind::kSegv},   {"abort", FaultKind::kAbort},
    {"throw", FaultKind::kThrow}, {"error", FaultKind::kError},
    {"exit", FaultKind::kExit},   {"nan", FaultKind::kNan},
    {"slow", FaultKind::kSlow},
};
constexpr std::pair<absl::string_view, Operation> kOperations[] = {
    {"any", Operation::kAny},
    {"all_gather", Operation::kAllGather},
    {"reduce_scatter", Operation::kReduceScatter},
    {"all_reduce", Operation::kAllReduce},
};
constexpr std::pair<absl::string_view, bool> kMoments[] = {{"start", false},
                                                           {"wait", true}};

absl::Status Wrong(absl::string_view key, absl::string_view value,
                   absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("fault plan: ", key, "=", value, ": expected ", expected));
}

// Looks up the value of `name` in a table.
template <typename T, size_t kCount>
absl::Status Look(const std::pair<absl::string_view, T> (&table)[kCount],
                  absl::string_view key, absl::string_view name, T* value) {
  std::string names;
  for (const auto& [known, its_value] : table) {
    if (known == name) {
      *value = its_value;
      return absl::OkStatus();
    }
    absl::StrAppend(&names, names.empty() ? "" : ", ", known);
  }
  return Wrong(key, name, absl::StrCat("one of ", names));
}

template <typename T>
absl::Status Count(absl::string_view key, absl::string_view text, T least,
                   T* value) {
  if (absl::SimpleAtoi(text, value) && *value >= least) return absl::OkStatus();
  return Wrong(key, text, absl::StrCat("a number of at least ", least));
}

absl::Status Set(absl::string_view key, absl::string_view value, Fault* fault) {
  if (key == "fault") return Look(kKinds, key, value, &fault->kind);
  if (key == "operation") {
    return Look(kOperations, key, value, &fault->operation);
  }
  if (key == "when") return Look(kMoments, key, value, &fault->in_wait);
  if (key == "restart") return Count(key, value, 0, &fault->restart);
  if (key == "replica") return Count(key, value, 0, &fault->replica);
  if (key == "rank") return Count(key, value, 0, &fault->rank);
  if (key == "step") return Count(key, value, int64_t{1}, &fault->step);
  if (key == "call") return Count(key, value, int64_t{0}, &fault->call);
  return Wrong(key, value,
               "fault, restart, replica, rank, step, operation, call or when");
}

}  // namespace

absl::StatusOr<std::vector<Fault>> ParseFaultPlan(absl::string_view text) {
  std::vector<Fault> plan;
  for (absl::string_view entry : absl::StrSplit(text, ';', absl::SkipEmpty())) {
    Fault fault;
    bool has_kind = false;
    for (absl::string_view field : absl::StrSplit(entry, ',')) {
      const std::pair<absl::string_view, absl::string_view> parts =
          absl::StrSplit(field, absl::MaxSplits('=', 1));
      FSDP_RETURN_IF_ERROR(Set(parts.first, parts.second, &fault));
      has_kind = has_kind || parts.first == "fault";
    }
    if (!has_kind) return Wrong("fault", "", "a fault in each entry");
    plan.push_back(fault);
  }
  return plan;
}

std::optional<Fault> FaultOf(const std::vector<Fault>& plan, int restart,
                             int replica, int rank) {
  for (const Fault& fault : plan) {
    if (fault.restart == restart && fault.replica == replica &&
        fault.rank == rank) {
      return fault;
    }
  }
  return std::nullopt;
}

absl::string_view Name(FaultKind kind) {
  for (const auto& [name, known] : kKinds) {
    if (known == kind) return name;
  }
  return "?";
}

}  // namespace gpt
