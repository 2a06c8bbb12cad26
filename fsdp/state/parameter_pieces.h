// Puts ranges of parameters together, whoever has cut them.
#ifndef FSDP_STATE_PARAMETER_PIECES_H_
#define FSDP_STATE_PARAMETER_PIECES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fsdp {

// A range of one parameter.
struct ParameterPiece {
  std::string name;
  std::vector<int64_t> sizes;    // of the whole parameter
  std::vector<int64_t> strides;  // which give its storage order
  int64_t begin;                 // in storage order
  at::Tensor values;             // 1-D, maybe empty
};

// Copies what `pieces`, all of one parameter, have of the elements from `begin`
// on into `target`, 1-D. NotFound, naming the first element that no piece has;
// nothing is copied then.
absl::Status CopyFromPieces(absl::Span<const ParameterPiece* const> pieces,
                            int64_t begin, const at::Tensor& target);

}  // namespace fsdp

#endif  // FSDP_STATE_PARAMETER_PIECES_H_
