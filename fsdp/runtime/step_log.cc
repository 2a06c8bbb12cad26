#include "fsdp/runtime/step_log.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"

namespace fsdp {
namespace {

using UnitName = std::function<std::string(int unit)>;

std::string TextOf(const Action& action, const UnitName& name) {
  return absl::StrCat(Name(action.kind), " of ", name(action.unit));
}

std::string DifferenceOf(const StepRecord& before, const StepRecord& after,
                         const UnitName& name) {
  const std::string text = TextOf(after.action, name);
  if (!(before.action == after.action)) {
    return absl::StrCat(text, ": the step before did ",
                        TextOf(before.action, name));
  }
  if (after.read_flags) {
    return absl::StrCat(
        text,
        ": this rank has no gradient of one of its parameters, and the host "
        "asks the device whether another rank has one");
  }
  const auto moved = [&](const char* what) {
    return absl::StrCat(text, ": ", what,
                        " lies elsewhere than in the step before");
  };
  if (before.gathered != after.gathered) return moved("what is gathered");
  if (before.reduced != after.reduced) return moved("what is reduced");
  return "";
}

}  // namespace

std::string DifferenceOf(const StepLog& before, const StepLog& after,
                         const UnitName& name) {
  const size_t common = std::min(before.size(), after.size());
  for (size_t i = 0; i < common; ++i) {
    std::string difference = DifferenceOf(before[i], after[i], name);
    if (!difference.empty()) return difference;
  }
  if (before.size() == after.size()) return "";
  if (before.size() > common) {
    return absl::StrCat("only the step before did ",
                        TextOf(before[common].action, name));
  }
  return absl::StrCat("the step before did no ",
                      TextOf(after[common].action, name));
}

namespace {

const char* NameOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kGather:
      return "all-gather ";
    case ActionKind::kReduce:
      return "reduce-scatter ";
    default:
      return "all-reduce ";
  }
}

}  // namespace

void OrderLog::Add(ActionKind kind, int unit, const std::string& label,
                   int64_t bytes, c10::ScalarType dtype) {
  const auto mix = [this](uint64_t value) {
    hash_ = (hash_ ^ value) * 0x100000001b3;
  };
  mix(static_cast<uint64_t>(kind));
  mix(static_cast<uint64_t>(unit));
  mix(static_cast<uint64_t>(bytes));
  mix(static_cast<uint64_t>(dtype));
  ++count_;
  if (first_.size() < kKept) first_.push_back({kind, &label, bytes, dtype});
}

void OrderLog::Clear() {
  hash_ = kNothing;
  count_ = 0;
  first_.clear();
}

std::string OrderLog::ToString() const {
  std::string text;
  for (const Entry& entry : first_) {
    absl::StrAppend(&text, NameOf(entry.kind), *entry.label, ", ", entry.bytes,
                    " bytes ", c10::toString(entry.dtype), "\n");
  }
  if (count_ > first_.size()) {
    absl::StrAppend(&text, "and ", count_ - first_.size(), " more\n");
  }
  return text;
}

}  // namespace fsdp
