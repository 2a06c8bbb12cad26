#include "fsdp/state/parameter_pieces.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace fsdp {

absl::Status CopyFromPieces(absl::Span<const ParameterPiece* const> pieces,
                            int64_t begin, const at::Tensor& target) {
  std::vector<const ParameterPiece*> sorted(pieces.begin(), pieces.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const ParameterPiece* a, const ParameterPiece* b) {
              return a->begin < b->begin;
            });
  const int64_t end = begin + target.numel();
  int64_t covered = begin;
  for (const ParameterPiece* piece : sorted) {
    if (piece->begin > covered) break;
    covered = std::max(covered, piece->begin + piece->values.numel());
  }
  if (covered < end) {
    return absl::NotFoundError(absl::StrCat("no piece has element ", covered));
  }
  c10::NoGradGuard no_grad;
  for (const ParameterPiece* piece : sorted) {
    const int64_t from = std::max(begin, piece->begin);
    const int64_t to = std::min(end, piece->begin + piece->values.numel());
    if (from >= to) continue;
    target.narrow(0, from - begin, to - from)
        .copy_(piece->values.narrow(0, from - piece->begin, to - from));
  }
  return absl::OkStatus();
}

}  // namespace fsdp
