#include "fsdp/options/wrap_policy.h"

#include <cstdint>
#include <utility>

namespace fsdp {

WrapPolicy WrapLargerThan(int64_t min_numel) {
  return [min_numel](const WrapCandidate& candidate) {
    return candidate.unowned_numel >= min_numel;
  };
}

WrapPolicy EveryUnit() {
  return [](const WrapCandidate& candidate) { return candidate.is_unit; };
}

WrapPolicy WrapAny(WrapPolicy first, WrapPolicy second) {
  return [first = std::move(first),
          second = std::move(second)](const WrapCandidate& candidate) {
    return first(candidate) || second(candidate);
  };
}

}  // namespace fsdp
