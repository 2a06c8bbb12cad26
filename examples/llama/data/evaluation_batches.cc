#include "examples/llama/data/evaluation_batches.h"

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status_macros.h"

namespace llama {

absl::StatusOr<EvaluationBatches> EvaluationBatches::Create(
    std::shared_ptr<const RowSource> source, const BatchShare& share) {
  FSDP_RETURN_IF_ERROR(CheckShare(share));
  return EvaluationBatches(std::move(source), share);
}

EvaluationBatches::EvaluationBatches(std::shared_ptr<const RowSource> source,
                                     const BatchShare& share)
    : source_(std::move(source)), share_(share) {}

int64_t EvaluationBatches::num_batches() const {
  return (source_->num_rows() - 1) / share_.rows + 1;
}

absl::StatusOr<Batch> EvaluationBatches::Read(int64_t batch) const {
  FSDP_CHECK(batch >= 0 && batch < num_batches());
  std::vector<int64_t> rows(share_.own_rows());
  std::iota(rows.begin(), rows.end(), batch * share_.rows + share_.first_row());
  return ReadBatch(*source_, rows);
}

}  // namespace llama
