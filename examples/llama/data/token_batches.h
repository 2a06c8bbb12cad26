// Batches to train on, without end.
#ifndef EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_
#define EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/llama/data/batch.h"
#include "examples/llama/data/row_source.h"

namespace llama {

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

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_BATCHES_H_
