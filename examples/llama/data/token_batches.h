// Batches to train on, without end.
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

// Batches of a rank.

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

// The rows of a source in an order that a seed has chosen, another one in each
// epoch, and each once in it. An epoch follows the other within a batch: no row
// is left out where they do not fit. Which rows a batch has does not depend on
// how many ranks share it. Thread-compatible.
class TokenBatches {
 public:
  // InvalidArgument: CheckShare(). Ranks give the same source and seed.
  static absl::StatusOr<TokenBatches> Create(
      std::shared_ptr<const RowSource> source, const BatchShare& share,
      uint64_t seed);

  // This rank's rows of the next batch: share.own_rows() of them, those from
  // share.first_row() on. After an error, which is the source's and may be one
  // rank's alone, the position is what it was.
  absl::StatusOr<Batch> Next();

  // Rows that batches of all ranks have had: what a checkpoint keeps. It says
  // the same whatever the number of ranks and rows of a batch.
  int64_t position() const { return position_; }
  // In no time. InvalidArgument: less than 0, or more than 2^62.
  absl::Status Seek(int64_t position);

  // Of the row at position(), from 0.
  int64_t epoch() const { return position_ / source_->num_rows(); }

 private:
  TokenBatches(std::shared_ptr<const RowSource> source, const BatchShare& share,
               uint64_t seed);

  std::shared_ptr<const RowSource> source_;
  BatchShare share_;
  uint64_t seed_;
  int64_t position_ = 0;
};

// Batches to measure with.

// Every row of a source once, in order, in batches that ranks share. All ranks
// have as many, so that collectives match; where rows run out, there is
// padding, on some ranks nothing else: a mean is the sum over the targets of
// all ranks, divided by how many there are. Which rows a batch has does not
// depend on how many ranks share it. Thread-safe.
class EvaluationBatches {
 public:
  // InvalidArgument: CheckShare().
  static absl::StatusOr<EvaluationBatches> Create(
      std::shared_ptr<const RowSource> source, const BatchShare& share);

  int64_t num_batches() const;

  // This rank's rows of a batch in [0, num_batches()): share.own_rows() of
  // them, those from share.first_row() on. Errors are the source's.
  absl::StatusOr<Batch> Read(int64_t batch) const;

 private:
  EvaluationBatches(std::shared_ptr<const RowSource> source,
                    const BatchShare& share);

  std::shared_ptr<const RowSource> source_;
  BatchShare share_;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_
