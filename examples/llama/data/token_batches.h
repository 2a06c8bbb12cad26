// Batches of rows for each rank, to train on and to measure with.
#ifndef EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_
#define EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/llama/data/window_rows.h"

namespace llama {

struct Batch {
  at::Tensor tokens;   // int64 [rows, seq], on the CPU
  at::Tensor targets;  // likewise: the next token, or kNoTarget
  // For each row, where documents begin, ascending from 0: positions begin anew
  // there, and no token sees another document. Empty: the row is one text.
  std::vector<std::vector<int64_t>> documents;
};

// Says which rows of a batch of all ranks are this rank's.
struct BatchShare {
  int64_t rows = 1;  // of all ranks
  int rank = 0;
  int world_size = 1;

  int64_t own_rows() const { return rows / world_size; }
  int64_t first_row() const { return rank * own_rows(); }
};

// InvalidArgument: ranks would not get equally many rows, at least one.
absl::Status CheckShare(const BatchShare& share);

// Reads these rows; those past the end of the source are padding. Errors are
// those of the source.
absl::StatusOr<Batch> ReadBatch(const RowSource& source,
                                absl::Span<const int64_t> rows);

// The rows of a source without end, each once per epoch, in an order that a
// seed chooses, another one in each epoch. The next epoch begins within a
// batch, so that no row is left out. The rows of a batch do not depend on how
// many ranks share it. Thread-compatible.
class TokenBatches {
 public:
  // InvalidArgument: CheckShare() refuses. Ranks pass the same source and seed.
  static absl::StatusOr<TokenBatches> Create(
      std::shared_ptr<const RowSource> source, const BatchShare& share,
      uint64_t seed);

  // Returns this rank's rows of the next batch: share.own_rows() rows from
  // share.first_row() on. An error, which is the source's, may be this rank's
  // alone, and leaves the position as it was.
  absl::StatusOr<Batch> Next();

  // The number of rows that batches of all ranks have had, for checkpoints. It
  // does not depend on the number of ranks and the rows of a batch.
  int64_t position() const { return position_; }
  // Sets the position, in no time. InvalidArgument: it is negative or above
  // 2^62.
  absl::Status Seek(int64_t position);

 private:
  TokenBatches(std::shared_ptr<const RowSource> source, const BatchShare& share,
               uint64_t seed);

  std::shared_ptr<const RowSource> source_;
  BatchShare share_;
  uint64_t seed_;
  int64_t position_ = 0;
};

// Batches to measure with: every row of a source once, in order, in batches
// that ranks share. All ranks have equally many batches, so that collectives
// match. Where rows run out there is padding, on some ranks nothing else; so a
// mean is the sum over the targets of all ranks, divided by their number. The
// rows of a batch do not depend on how many ranks share it. Thread-safe.
class EvaluationBatches {
 public:
  // InvalidArgument: CheckShare() refuses.
  static absl::StatusOr<EvaluationBatches> Create(
      std::shared_ptr<const RowSource> source, const BatchShare& share);

  int64_t num_batches() const;

  // Returns this rank's rows of a batch in [0, num_batches()): share.own_rows()
  // rows from share.first_row() on. Errors are the source's.
  absl::StatusOr<Batch> Read(int64_t batch) const;

 private:
  EvaluationBatches(std::shared_ptr<const RowSource> source,
                    const BatchShare& share);

  std::shared_ptr<const RowSource> source_;
  BatchShare share_;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_
