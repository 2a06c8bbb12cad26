#include "checkpoint/load/load_plan.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "checkpoint/format/tensor_bytes.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint {
namespace {

using Sizes = std::vector<int64_t>;

std::string Text(const Sizes& sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

// Nothing is cut off: an index or a flag is what it was or is refused.
bool CanBecome(c10::ScalarType stored, c10::ScalarType wanted) {
  if (c10::isFloatingType(wanted)) return c10::isFloatingType(stored);
  if (c10::isComplexType(wanted)) return c10::isComplexType(stored);
  return stored == wanted;
}

std::string Wanted(c10::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) return "a floating-point one";
  if (c10::isComplexType(dtype)) return "a complex one";
  const std::optional<Dtype> name = FileDtype(dtype);
  return name.has_value() ? std::string(NameOf(*name)) : c10::toString(dtype);
}

// False: it has no such rows.
bool TakeRows(int64_t first, int64_t last, WholeRead::Piece* piece) {
  Sizes& shape = piece->shape;
  if (shape.empty() || first < 0 || last < first || last > shape[0]) {
    return false;
  }
  piece->begin += first * c10::numelements_from_dim(1, shape);
  shape[0] = last - first;
  return true;
}

absl::Status Bad(const std::string& why) {
  return absl::InvalidArgumentError(why);
}

// Returns the factor of `stored`, null if it has none. The error says why its
// values are not known.
absl::StatusOr<const StoredTensor*> ScaleOf(const Catalog& catalog,
                                            const StoredTensor& stored,
                                            c10::ScalarType wanted) {
  const Dtype dtype = stored.info.dtype;
  if (!absl::StartsWith(NameOf(dtype), "F8_") || FileDtype(wanted) == dtype) {
    return nullptr;
  }
  const std::string& name = stored.info.name;
  const StoredTensor* scale = catalog.Find(absl::StrCat(name, "_scale"));
  if (scale == nullptr) scale = catalog.Find(absl::StrCat(name, "_scale_inv"));
  if (scale == nullptr) {
    return Bad(absl::StrCat(
        "dtype ", NameOf(dtype), " with neither ", name, "_scale nor ", name,
        "_scale_inv beside it, so that its values are not known: convert the "
        "model to BF16 first"));
  }
  const Sizes& shape = stored.info.shape;
  Sizes scales = scale->info.shape;
  const auto type = TorchDtype(scale->info.dtype);
  bool is_known = type.has_value() && c10::isFloatingType(*type) &&
                  !shape.empty() && scales.size() <= 2;
  const bool has_blocks = shape.size() == 2 && scales.size() == 2;
  scales.resize(2, 1);
  for (size_t d = 0; d < 2 && is_known; ++d) {
    const int64_t size = d < shape.size() ? shape[d] : 1;
    const int64_t blocks = (size + kScaleBlock - 1) / kScaleBlock;
    is_known = scales[d] == 1 || (d == 0 && scales[d] == size) ||
               (has_blocks && scales[d] == blocks);
  }
  if (is_known) return scale;
  return Bad(absl::StrCat(
      ToString(stored.info), " with ", scale->info.name, ", ",
      ToString(scale->info), ": one number, one for each row, or one for each ",
      "block of ", kScaleBlock, " x ", kScaleBlock, " would be known"));
}

// Returns what a recipe takes out of `stored` for values of dtype `wanted`. The
// error says why it does not fit.
absl::StatusOr<WholeRead::Piece> PieceOf(c10::ScalarType wanted,
                                         const RecipePiece& piece,
                                         const StoredTensor& stored) {
  WholeRead::Piece result{&stored, 0, stored.info.shape, piece.transposed};
  const auto dtype = TorchDtype(stored.info.dtype);
  if (!dtype.has_value()) {
    return Bad(absl::StrCat("dtype ", NameOf(stored.info.dtype),
                            ", which LibTorch does not have"));
  }
  if (!CanBecome(*dtype, wanted)) {
    return Bad(absl::StrCat("dtype ", NameOf(stored.info.dtype), " instead of ",
                            Wanted(wanted)));
  }
  if (piece.layer.has_value()) {
    Sizes& shape = result.shape;
    if (shape.empty() || *piece.layer < 0 || *piece.layer >= shape[0]) {
      return Bad(absl::StrCat("layer ", *piece.layer, " of ", piece.name,
                              ", which is ", Text(result.shape)));
    }
    shape.erase(shape.begin());
    result.begin += *piece.layer * c10::multiply_integers(shape);
  }
  if (piece.rows.has_value()) {
    const auto [first, last] = *piece.rows;
    if (!TakeRows(first, last, &result)) {
      return Bad(absl::StrCat("rows ", first, " to ", last, " of ", piece.name,
                              ", which is ", Text(result.shape)));
    }
  }
  if (piece.transposed && result.shape.size() < 2) {
    return Bad(absl::StrCat("the transpose of ", piece.name, ", which is ",
                            Text(result.shape)));
  }
  return result;
}

Sizes ShapeOf(const WholeRead::Piece& piece) {
  Sizes shape = piece.shape;
  if (piece.transposed) std::swap(shape[0], shape[1]);
  return shape;
}

absl::Status CheckShape(const TensorRange& target, const WholeRead& read) {
  if (read.pieces.empty()) return Bad("a recipe without pieces");
  Sizes shape = ShapeOf(read.pieces.front());
  const auto dim = static_cast<size_t>(read.dim);
  for (size_t i = 1; i < read.pieces.size(); ++i) {
    const Sizes next = ShapeOf(read.pieces[i]);
    bool fits = next.size() == shape.size() && dim < shape.size();
    for (size_t d = 0; fits && d < shape.size(); ++d) {
      fits = d == dim || next[d] == shape[d];
    }
    if (!fits) {
      return Bad(absl::StrCat("pieces of shapes ", Text(shape), " and ",
                              Text(next), " do not go together"));
    }
    shape[dim] += next[dim];
  }
  const Sizes& wanted =
      read.conversion.has_value() ? read.conversion->sizes : target.sizes;
  if (shape != wanted) {
    return Bad(
        absl::StrCat("shape ", Text(shape), " instead of ", Text(wanted)));
  }
  if (!read.conversion.has_value() ||
      (!shape.empty() && !target.sizes.empty() &&
       shape[0] == target.sizes[0])) {
    return absl::OkStatus();
  }
  return Bad(absl::StrCat("rows of ", Text(shape), " cannot become those of ",
                          Text(target.sizes)));
}

bool IsStraight(const TensorRange& target, const WholeRead& read) {
  if (!target.RowMajorValues().defined()) return false;
  if (read.pieces.size() > 1 && read.dim != 0) return false;
  return std::none_of(read.pieces.begin(), read.pieces.end(),
                      [](const auto& piece) { return piece.transposed; });
}

class Planner {
 public:
  Planner(const Catalog& catalog, absl::Span<const TensorRange> targets,
          const LoadPlanOptions& options)
      : catalog_(catalog), targets_(targets), options_(options) {
    if (options.aliases == nullptr) return;
    for (const auto& [alias, name] : *options.aliases) {
      aliases_[name].push_back(alias);
    }
  }

  absl::StatusOr<LoadPlan> Run() {
    for (size_t i = 0; i < targets_.size(); ++i) {
      PlanTarget(static_cast<int>(i));
    }
    for (const StoredTensor& stored : catalog_.tensors()) {
      if (!options_.strict || seen_.count(&stored) > 0) continue;
      if (options_.ignored && options_.ignored(stored.info.name)) continue;
      problems_.push_back(absl::StrCat("unexpected: ", stored.info.name));
    }
    if (problems_.empty()) return std::move(plan_);
    return absl::InvalidArgumentError(
        absl::StrCat("the files do not fit the model, which is as before:\n  ",
                     absl::StrJoin(problems_, "\n  ")));
  }

 private:
  void PlanTarget(int index) {
    const TensorRange& target = targets_[index];
    const std::optional<TensorRecipe> recipe = RecipeOf(target);
    if (!recipe.has_value()) return;
    WholeRead read;
    read.target = index;
    read.dim = recipe->dim;
    read.conversion = recipe->conversion;
    const c10::ScalarType wanted =
        read.conversion.has_value() ? c10::kFloat : target.file_dtype();
    for (const RecipePiece& piece : recipe->pieces) {
      const StoredTensor* const stored = catalog_.Find(piece.name);
      if (stored == nullptr) {
        const bool is_saved =
            options_.saves == nullptr || options_.saves(target.name);
        if (!options_.strict || !is_saved) return;
        problems_.push_back(absl::StrCat("missing: ", piece.name));
        if (piece.name != target.name) {
          absl::StrAppend(&problems_.back(), ", for ", target.name);
        }
        return;
      }
      seen_.insert(stored);
      FindCopies(target, *recipe, *stored);
      absl::StatusOr<WholeRead::Piece> taken = PieceOf(wanted, piece, *stored);
      if (!taken.ok()) return Refuse(target, taken.status());
      const absl::StatusOr<const StoredTensor*> scale =
          ScaleOf(catalog_, *stored, target.file_dtype());
      if (!scale.ok()) return Refuse(target, scale.status());
      if (*scale != nullptr) {
        if (piece.layer.has_value()) {
          return Refuse(target, Bad("a layer of scaled numbers"));
        }
        taken->scale = *scale;
        seen_.insert(*scale);
        if (!read.conversion.has_value()) {
          read.conversion = {target.sizes, [](const at::Tensor& rows) {
                               return absl::StatusOr<at::Tensor>(rows);
                             }};
        }
      }
      read.pieces.push_back(*std::move(taken));
    }
    const absl::Status fits = CheckShape(target, read);
    if (!fits.ok()) return Refuse(target, fits);
    if (!IsStraight(target, read)) {
      plan_.whole.push_back(std::move(read));
    } else if (read.conversion.has_value()) {
      PlanConverted(target, read);
    } else {
      PlanStraight(target, read);
    }
  }

  // Nothing: it keeps its value.
  std::optional<TensorRecipe> RecipeOf(const TensorRange& target) const {
    std::optional<TensorRecipe> recipe;
    if (options_.mapping != nullptr) {
      recipe = options_.mapping(target.name);
    } else {
      recipe = TensorRecipe::Of(target.name);
      const auto aliases = aliases_.find(target.name);
      if (aliases != aliases_.end()) recipe->copies = aliases->second;
    }
    if (!recipe.has_value() || recipe->pieces.size() != 1) return recipe;
    for (std::string& alias : recipe->copies) {
      std::string& name = recipe->pieces[0].name;
      if (catalog_.Find(name) != nullptr) break;
      if (catalog_.Find(alias) != nullptr) std::swap(name, alias);
    }
    return recipe;
  }

  void FindCopies(const TensorRange& target, const TensorRecipe& recipe,
                  const StoredTensor& stored) {
    for (const std::string& name : recipe.copies) {
      const StoredTensor* const copy = catalog_.Find(name);
      if (copy == nullptr) continue;
      seen_.insert(copy);
      // Each rank looks at what it loads.
      const bool is_part =
          target.RowMajorValues().defined() && !recipe.conversion.has_value();
      const int64_t begin = is_part ? target.begin : 0;
      plan_.copied.push_back(
          {&stored, copy, begin,
           begin + (is_part ? target.values.numel()
                            : c10::multiply_integers(stored.info.shape))});
    }
  }

  void Refuse(const TensorRange& target, const absl::Status& why) {
    problems_.push_back(absl::StrCat(target.name, ": ", why.message()));
  }

  // The pieces are ranges of the target's elements, one behind the other.
  void PlanStraight(const TensorRange& target, const WholeRead& read) {
    const int64_t end = target.end();
    int64_t piece_begin = 0;
    for (const WholeRead::Piece& piece : read.pieces) {
      const int64_t piece_end =
          piece_begin + c10::multiply_integers(piece.shape);
      const int64_t from = std::max(target.begin, piece_begin);
      const int64_t to = std::min(end, piece_end);
      if (from < to) {
        const int64_t shift = piece.begin - piece_begin;
        const TensorInfo& stored = piece.tensor->info;
        const absl::StatusOr<std::vector<FileRun>> runs =
            RunsOf(*piece.tensor, from + shift, to + shift);
        if (runs.ok()) {
          for (const FileRun& run : *runs) {
            plan_.straight.push_back(
                {read.target,
                 from - target.begin + run.target / ItemBytes(stored.dtype),
                 *TorchDtype(stored.dtype), run});
          }
        } else {
          Refuse(target, runs.status());
        }
      }
      piece_begin = piece_end;
    }
  }

  // The rows in which the target's elements lie, a few at a time.
  void PlanConverted(const TensorRange& target, const WholeRead& read) {
    const int64_t row = c10::numelements_from_dim(1, target.sizes);
    if (target.values.numel() == 0) return;
    const int64_t last = (target.end() - 1) / row + 1;
    const int64_t bytes = c10::numelements_from_dim(1, read.conversion->sizes) *
                          ItemBytes(read.pieces[0].tensor->info.dtype);
    const int64_t step = std::max<int64_t>(
        1, options_.converted_bytes / std::max<int64_t>(1, bytes));
    for (int64_t first = target.begin / row; first < last; first += step) {
      plan_.whole.push_back(
          {read.target,
           RowsOfAll(read.pieces, first, std::min(first + step, last)),
           /*dim=*/0, read.conversion, first});
    }
  }

  // Rows [first, last) of the pieces together.
  static std::vector<WholeRead::Piece> RowsOfAll(
      const std::vector<WholeRead::Piece>& pieces, int64_t first,
      int64_t last) {
    std::vector<WholeRead::Piece> rows;
    int64_t begin = 0;
    for (const WholeRead::Piece& piece : pieces) {
      const int64_t end = begin + piece.shape[0];
      const int64_t from = std::max(first, begin);
      const int64_t to = std::min(last, end);
      if (from < to) {
        FSDP_CHECK(
            TakeRows(from - begin, to - begin, &rows.emplace_back(piece)));
      }
      begin = end;
    }
    return rows;
  }

  const Catalog& catalog_;
  const absl::Span<const TensorRange> targets_;
  const LoadPlanOptions& options_;
  std::map<std::string, std::vector<std::string>> aliases_;  // by target
  LoadPlan plan_;
  std::set<const StoredTensor*> seen_;
  std::vector<std::string> problems_;
};

}  // namespace

absl::StatusOr<LoadPlan> PlanLoad(const Catalog& catalog,
                                  absl::Span<const TensorRange> targets,
                                  const LoadPlanOptions& options) {
  return Planner(catalog, targets, options).Run();
}

}  // namespace fsdp::checkpoint
