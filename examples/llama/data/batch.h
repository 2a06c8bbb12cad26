// Batches of a rank.
#ifndef EXAMPLES_LLAMA_DATA_BATCH_H_
#define EXAMPLES_LLAMA_DATA_BATCH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/llama/data/row_source.h"

namespace llama {

struct Batch {
  at::Tensor tokens;   // int64 [rows, seq], on the CPU
  at::Tensor targets;  // as large: the token that follows, or kNoTarget
  // Of each row where documents begin, ascending from 0: positions begin anew
  // there and nothing looks across. Empty: nobody says, the row is one text.
  std::vector<std::vector<int64_t>> documents;
};

// Which rows of a batch that all ranks have together are this one's.
struct BatchShare {
  int64_t rows = 1;  // of all ranks
  int rank = 0;
  int world_size = 1;

  int64_t own_rows() const { return rows / world_size; }
  int64_t first_row() const { return rank * own_rows(); }
};

// InvalidArgument unless each rank gets as many rows, at least one.
absl::Status CheckShare(const BatchShare& share);

// These rows; those past the end of the source are padding. Errors are those of
// the source.
absl::StatusOr<Batch> ReadBatch(const RowSource& source,
                                absl::Span<const int64_t> rows);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_BATCH_H_
