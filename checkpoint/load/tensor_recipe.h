// Where the tensors of a model come from in files that name and lay them out
// otherwise.
#ifndef CHECKPOINT_LOAD_TENSOR_RECIPE_H_
#define CHECKPOINT_LOAD_TENSOR_RECIPE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace fsdp::checkpoint {

// A tensor of a file, or some of its rows.
struct RecipePiece {
  std::string name;  // in the file
  // [first, last) of its dimension 0; unset: all.
  std::optional<std::pair<int64_t, int64_t>> rows = std::nullopt;
  // Then dimensions 0 and 1 change places, as in Linear and GPT-2's Conv1D.
  bool transposed = false;
  // The tensor is meant that has this place in dimension 0 of the file's, as
  // where Megatron keeps all layers in one; `rows` and `transposed` are those
  // of what is left. Unset: the file's.
  std::optional<int64_t> layer = std::nullopt;
};

// What a tensor of floating-point numbers becomes while it is read, each row
// for itself: int8 with scales, for example.
struct RowConversion {
  // Of what the pieces give, with as many rows as the model's tensor has.
  std::vector<int64_t> sizes;
  // Some of its rows, on the CPU, in the dtype of the file, as those rows of
  // the model's tensor, in its dtype. Errors end the loading on all ranks.
  std::function<absl::StatusOr<at::Tensor>(const at::Tensor& rows)> convert;
};

// The pieces one behind the other along `dim`, such as q, k and v of a fused
// projection. Rows that are put together along dimension 0 as they are cost no
// memory, and where they are converted that of a few of them; anything else
// needs the whole tensor once.
struct TensorRecipe {
  std::vector<RecipePiece> pieces;
  int64_t dim = 0;
  std::optional<RowConversion> conversion = std::nullopt;
  // Of one piece, a whole tensor: other names under which files may have it
  // once more. They are refused where they have other values.
  std::vector<std::string> copies = {};

  // A tensor as it is.
  static TensorRecipe Of(std::string name) {
    TensorRecipe recipe;
    recipe.pieces.push_back({std::move(name)});
    return recipe;
  }
};

// Of the name that a parameter or buffer has in the model. Nothing: it keeps
// the value it has.
using TensorMapping =
    std::function<std::optional<TensorRecipe>(const std::string& name)>;

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_TENSOR_RECIPE_H_
