// Batches to measure with.
#ifndef EXAMPLES_LLAMA_DATA_EVALUATION_BATCHES_H_
#define EXAMPLES_LLAMA_DATA_EVALUATION_BATCHES_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "examples/llama/data/batch.h"
#include "examples/llama/data/row_source.h"

namespace llama {

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

#endif  // EXAMPLES_LLAMA_DATA_EVALUATION_BATCHES_H_
