// checkpoint diff A B.
#ifndef TOOLS_CHECKPOINT_DIFF_H_
#define TOOLS_CHECKPOINT_DIFF_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {

struct DiffOptions {
  int64_t top = 10;  // length of each list of the largest differences
  OnBytes progress;  // counts the bytes of `a`
};

struct DiffResult {
  bool same = true;  // in names, shapes, dtypes and bits
  std::string text;
};

// Compares tensors by name, in O(buffer) memory: those of equal shape and dtype
// by their bits, those of equal shape and different dtype by their values.
absl::StatusOr<DiffResult> Diff(const Source& a, const Source& b,
                                const DiffOptions& options);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_DIFF_H_
