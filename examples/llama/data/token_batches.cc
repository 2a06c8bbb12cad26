#include "examples/llama/data/token_batches.h"

#include <ATen/ops/full.h>

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "examples/llama/data/window_rows.h"

namespace llama {

absl::Status CheckShare(const BatchShare& share) {
  const bool is_rank = share.rank >= 0 && share.rank < share.world_size;
  if (is_rank && share.rows > 0 && share.rows % share.world_size == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a batch of ", share.rows, " rows for rank ", share.rank, " of ",
      share.world_size,
      ": ranks get equal parts; take a multiple of the number of ranks"));
}

absl::StatusOr<Batch> ReadBatch(const RowSource& source,
                                absl::Span<const int64_t> rows) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  const int64_t seq = source.seq();
  Batch batch;
  batch.tokens = at::full({num_rows, seq}, kPadding, at::kLong);
  batch.targets = at::full({num_rows, seq}, kNoTarget, at::kLong);
  batch.documents.resize(rows.size());
  int64_t* const tokens = batch.tokens.mutable_data_ptr<int64_t>();
  int64_t* const targets = batch.targets.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_rows; ++i) {
    if (rows[i] >= source.num_rows()) continue;
    const auto size = static_cast<size_t>(seq);
    Row row = {absl::MakeSpan(tokens + i * seq, size),
               absl::MakeSpan(targets + i * seq, size),
               {}};
    FSDP_RETURN_IF_ERROR(source.Read(rows[i], row));
    batch.documents[i] = std::move(row.documents);
  }
  return batch;
}

absl::StatusOr<TokenBatches> TokenBatches::Create(
    std::shared_ptr<const RowSource> source, const BatchShare& share,
    uint64_t seed) {
  FSDP_RETURN_IF_ERROR(CheckShare(share));
  return TokenBatches(std::move(source), share, seed);
}

TokenBatches::TokenBatches(std::shared_ptr<const RowSource> source,
                           const BatchShare& share, uint64_t seed)
    : source_(std::move(source)), share_(share), seed_(seed) {}

absl::Status TokenBatches::Seek(int64_t position) {
  if (position < 0 || position > int64_t{1} << 62) {
    return absl::InvalidArgumentError(
        absl::StrCat("the position ", position,
                     " in the data: it has to be from 0 to 2^62; "
                     "take that of another checkpoint"));
  }
  position_ = position;
  return absl::OkStatus();
}

absl::StatusOr<Batch> TokenBatches::Next() {
  std::vector<int64_t> rows;
  const int64_t first = position_ + share_.first_row();
  for (int64_t i = first; i < first + share_.own_rows(); ++i) {
    const int64_t epoch = i / source_->num_rows();
    const Permutation order(source_->num_rows(), MixSeeds(seed_, epoch));
    rows.push_back(order(i % source_->num_rows()));
  }
  FSDP_ASSIGN_OR_RETURN(Batch batch, ReadBatch(*source_, rows));
  position_ += share_.rows;
  return batch;
}

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
