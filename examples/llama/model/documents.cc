#include "examples/llama/model/documents.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace llama {

absl::Status CheckDocumentStarts(absl::Span<const int64_t> starts, int64_t rows,
                                 int64_t tokens) {
  if (starts.empty()) return absl::OkStatus();
  for (size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] > starts[i - 1]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("documents begin at ", starts[i - 1], " and then at ",
                     starts[i], ": starts have to ascend"));
  }
  for (const int64_t start : {starts.front(), starts.back()}) {
    if (start >= 0 && start < rows * tokens) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a document begins at ", start, " of ", rows, " rows of ",
                     tokens, " tokens"));
  }
  for (int64_t row = 0; row < rows; ++row) {
    if (std::binary_search(starts.begin(), starts.end(), row * tokens)) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "row ", row, " does not begin with a document: no start is ",
        row * tokens, "; starts count all tokens of the batch"));
  }
  return absl::OkStatus();
}

std::vector<int64_t> DocumentLengths(absl::Span<const int64_t> starts,
                                     int64_t all) {
  std::vector<int64_t> lengths(starts.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    lengths[i] = (i + 1 < starts.size() ? starts[i + 1] : all) - starts[i];
  }
  return lengths;
}

std::vector<int64_t> DocumentPositions(absl::Span<const int64_t> starts,
                                       int64_t all) {
  std::vector<int64_t> positions;
  positions.reserve(static_cast<size_t>(all));
  for (const int64_t length : DocumentLengths(starts, all)) {
    positions.resize(positions.size() + static_cast<size_t>(length));
    std::iota(positions.end() - length, positions.end(), 0);
  }
  return positions;
}

}  // namespace llama
