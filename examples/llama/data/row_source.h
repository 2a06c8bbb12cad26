// Rows of tokens to train on or to measure with.
#ifndef EXAMPLES_LLAMA_DATA_ROW_SOURCE_H_
#define EXAMPLES_LLAMA_DATA_ROW_SOURCE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace llama {

// The target where there is nothing to predict: what LibTorch's losses ignore.
inline constexpr int64_t kNoTarget = -100;
// The token where there is none; its target is kNoTarget.
inline constexpr int64_t kPadding = 0;

// One row, filled by its source.
struct Row {
  absl::Span<int64_t> tokens;   // seq of them
  absl::Span<int64_t> targets;  // as many: the token that follows, or kNoTarget
  // Where documents begin in it, ascending from 0; empty: nobody says.
  std::vector<int64_t> documents;
};

// A data set cut into rows of equal length, the same on all ranks. Every row
// has a target. Thread-safe.
class RowSource {
 public:
  virtual ~RowSource() = default;

  virtual int64_t seq() const = 0;
  virtual int64_t num_rows() const = 0;  // at least 1
  // `index` in [0, num_rows()); `row.documents` is empty before. Errors are
  // those of TokenFile.
  virtual absl::Status Read(int64_t index, Row& row) const = 0;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_ROW_SOURCE_H_
