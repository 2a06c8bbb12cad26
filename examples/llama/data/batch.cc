#include "examples/llama/data/batch.h"

#include <ATen/ops/full.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

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

}  // namespace llama
