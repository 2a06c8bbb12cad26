// Recipes for the tensors of a model from files that name or lay them out
// differently.
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
  // The rows [first, last) of dimension 0 that are used; unset: all.
  std::optional<std::pair<int64_t, int64_t>> rows = std::nullopt;
  // If true, dimensions 0 and 1 change places after that, as between Linear and
  // GPT-2's Conv1D.
  bool transposed = false;
  // If set, the piece is the tensor at this index of dimension 0 of the file's,
  // as where Megatron keeps all layers in one; `rows` and `transposed` apply to
  // that one.
  std::optional<int64_t> layer = std::nullopt;
};

// Converts a tensor of floating-point numbers while it is read, each row by
// itself: to int8 with scales, for example.
struct RowConversion {
  // The shape that the pieces give, with as many rows as the model's tensor.
  std::vector<int64_t> sizes;
  // Gets some rows, on the CPU in the dtype of the file; returns the same rows
  // of the model's tensor, in its dtype. An error ends the load on all ranks.
  std::function<absl::StatusOr<at::Tensor>(const at::Tensor& rows)> convert;
};

// Puts the pieces one behind the other along `dim`, such as q, k and v of a
// fused projection. Unconverted rows that are joined along dimension 0 cost no
// memory; converted ones cost that of a few rows; anything else needs memory
// for the whole tensor once.
struct TensorRecipe {
  std::vector<RecipePiece> pieces;  // in this order; at least one
  int64_t dim = 0;                  // dimension along which pieces are joined
  // Applied to the rows of the joined tensor; unset: only the dtype is cast.
  std::optional<RowConversion> conversion = std::nullopt;
  // If the recipe is one piece that is a whole tensor: other names under which
  // the files may repeat it, or have it alone. A copy with other values is
  // refused.
  std::vector<std::string> copies = {};

  // Takes a tensor as it is.
  static TensorRecipe Of(std::string name) {
    TensorRecipe recipe;
    recipe.pieces.push_back({std::move(name)});
    return recipe;
  }
};

// Returns the recipe for the parameter or buffer of this name in the model. If
// it returns nothing, the tensor keeps its value.
using TensorMapping =
    std::function<std::optional<TensorRecipe>(const std::string& name)>;

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_TENSOR_RECIPE_H_
