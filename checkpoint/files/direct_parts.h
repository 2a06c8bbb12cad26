// The part of a range of a file that can go past the page cache.
#ifndef CHECKPOINT_FILES_DIRECT_PARTS_H_
#define CHECKPOINT_FILES_DIRECT_PARTS_H_

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {

// Calls `move` with up to three parts of [begin, end), in order: what comes
// before the first multiple of `unit`, whole units, and the rest; one part when
// `unit` is 0.
inline absl::Status ForDirectParts(
    int64_t begin, int64_t end, int64_t unit,
    absl::FunctionRef<absl::Status(int64_t begin, int64_t end)> move) {
  if (unit == 0) return begin < end ? move(begin, end) : absl::OkStatus();
  const int64_t first = std::min((begin + unit - 1) / unit * unit, end);
  const int64_t last = std::max(end / unit * unit, first);
  if (begin < first) FSDP_RETURN_IF_ERROR(move(begin, first));
  if (first < last) FSDP_RETURN_IF_ERROR(move(first, last));
  return last < end ? move(last, end) : absl::OkStatus();
}

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_DIRECT_PARTS_H_
