#include "examples/llama/data/token_batches.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "examples/llama/data/permutation.h"

namespace llama {
namespace {

constexpr int64_t kMaxPosition = int64_t{1} << 62;

}  // namespace

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
  if (position < 0 || position > kMaxPosition) {
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

}  // namespace llama
