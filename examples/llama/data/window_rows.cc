#include "examples/llama/data/window_rows.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace llama {

absl::StatusOr<std::shared_ptr<const WindowRows>> WindowRows::Create(
    TokenFile file, int64_t seq, LastWindow last) {
  if (seq < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows of ", seq, " tokens: at least 1 is needed"));
  }
  const int64_t num_targets = file.num_tokens() - 1;
  int64_t num_rows = num_targets > 0 ? num_targets / seq : 0;
  if (last == LastWindow::kPadded && num_targets > num_rows * seq) ++num_rows;
  if (num_rows == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens of ", file.path(), ": there are ", file.num_tokens(),
        ", too few for one row of ", seq,
        " and the token after it: take shorter rows or more text"));
  }
  return std::shared_ptr<const WindowRows>(
      new WindowRows(std::move(file), seq, num_rows));
}

WindowRows::WindowRows(TokenFile file, int64_t seq, int64_t num_rows)
    : file_(std::move(file)), seq_(seq), num_rows_(num_rows) {}

absl::Status WindowRows::Read(int64_t index, Row& row) const {
  FSDP_CHECK(index >= 0 && index < num_rows_);
  const int64_t begin = index * seq_;
  const int64_t count = std::min(seq_, file_.num_tokens() - 1 - begin);
  FSDP_RETURN_IF_ERROR(file_.Read(begin, row.tokens.first(count)));
  FSDP_RETURN_IF_ERROR(file_.Read(begin + 1, row.targets.first(count)));
  std::fill(row.tokens.begin() + count, row.tokens.end(), kPadding);
  std::fill(row.targets.begin() + count, row.targets.end(), kNoTarget);
  return absl::OkStatus();
}

}  // namespace llama
