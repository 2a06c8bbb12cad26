#include "fsdp/runtime/order_log.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {
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
