// Plans which bytes of which files fill a model. The plan follows from names,
// shapes and ranges: nothing is read, and no messages are sent.
#ifndef CHECKPOINT_LOAD_LOAD_PLAN_H_
#define CHECKPOINT_LOAD_LOAD_PLAN_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/load/tensor_recipe.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {

// The rows and columns of a block with one scale, as in DeepSeek's models.
inline constexpr int64_t kScaleBlock = 128;

// Targets are ranges of the model's tensors, which files fill. Values whose
// memory is not as files have them (RowMajorValues()) are filled from whole
// tensors. Only floating-point values are cast.

// Bytes of a file that become elements of a target's values.
struct StraightRead {
  int target = 0;
  int64_t element = 0;                  // the first one, of RowMajorValues()
  c10::ScalarType dtype = c10::kFloat;  // in the file
  FileRun run;
};

// A target, or some of its rows, that is put together from whole tensors.
struct WholeRead {
  struct Piece {
    const StoredTensor* tensor;  // of the catalog
    int64_t begin = 0;           // the first element, counted in the tensor
    std::vector<int64_t> shape;  // in the file
    bool transposed = false;
    // For 8-bit floating-point numbers that are read as another dtype: the
    // factors of their values, one for all, one per row or one per block.
    const StoredTensor* scale = nullptr;
  };
  int target = 0;
  std::vector<Piece> pieces;
  int64_t dim = 0;  // along which the pieces are joined
  std::optional<RowConversion> conversion = std::nullopt;
  int64_t first_row = 0;  // of the target
};

// Elements that the files have twice, under two names.
struct CopiedRead {
  const StoredTensor* tensor;
  const StoredTensor* copy;
  int64_t begin = 0;
  int64_t end = 0;
};

struct LoadPlan {
  std::vector<CopiedRead> copied;
  std::vector<StraightRead> straight;
  std::vector<WholeRead> whole;
};

struct LoadPlanOptions {
  // If true, missing and unexpected tensors are refused.
  bool strict = true;
  // Tensors for which this returns true may be unexpected; null: none may.
  std::function<bool(const std::string& name)> ignored = nullptr;
  // Targets for which this returns false may be missing; null: none may.
  std::function<bool(const std::string& name)> saves = nullptr;
  // Maps other names that the files may have to those of targets; may be null.
  const std::map<std::string, std::string>* aliases = nullptr;
  // If null, each tensor is read as it is, by its own name.
  TensorMapping mapping = nullptr;
  // The bytes of a file that are converted at once; at least one row is.
  int64_t converted_bytes = int64_t{8} << 20;
};

// InvalidArgument lists all tensors that do not fit: missing or unexpected
// ones, or of another shape or dtype. Only floating-point numbers become other
// floating-point ones or are converted, only complex ones other complex ones.
// 8-bit floating-point numbers become others only if there is a scale beside
// them, NAME_scale or NAME_scale_inv, both of which multiply.
absl::StatusOr<LoadPlan> PlanLoad(const Catalog& catalog,
                                  absl::Span<const TensorRange> targets,
                                  const LoadPlanOptions& options);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_LOAD_PLAN_H_
