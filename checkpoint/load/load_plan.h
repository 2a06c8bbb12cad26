// Which bytes of which files fill a model. Follows from names, shapes and
// ranges: nothing is read, and no messages are sent.
#ifndef CHECKPOINT_LOAD_LOAD_PLAN_H_
#define CHECKPOINT_LOAD_LOAD_PLAN_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/load/tensor_recipe.h"

// What is to be filled from files.

namespace fsdp::checkpoint {

struct LoadTarget {
  std::string name;                       // in the model
  std::vector<std::string> aliases = {};  // any of them will do
  std::vector<int64_t> sizes;             // of the whole tensor
  // Of the value, without mixed precision. Only floating-point values are cast.
  c10::ScalarType dtype = c10::kFloat;
  // The elements from `begin` on, row-major: 1-D, of any dtype and device,
  // maybe resting, maybe empty. Undefined: only take_whole() can fill it.
  at::Tensor values;
  int64_t begin = 0;
  // Gets the whole tensor, on the CPU, in `dtype`.
  std::function<absl::Status(const at::Tensor& whole)> take_whole;
  // Targets of a unit are in memory together where they rest elsewhere.
  int unit = 0;
};

// Rows and columns of a block that has one scale, as in DeepSeek's models.
inline constexpr int64_t kScaleBlock = 128;

// Bytes of a file that become elements of a target's values.
struct StraightRead {
  int target = 0;
  int64_t element = 0;                  // the first one, of LoadTarget::values
  c10::ScalarType dtype = c10::kFloat;  // in the file
  FileRun run;
};

// A target that is put together from whole tensors.
struct WholeRead {
  struct Piece {
    const StoredTensor* tensor;  // of the catalog
    int64_t begin = 0;           // its first element, of the tensor's
    std::vector<int64_t> shape;  // in the file
    bool transposed = false;
    // Of 8-bit floating-point numbers that are read as others: what their
    // values are multiplied by, one for all, for each row, or for each block.
    const StoredTensor* scale = nullptr;
  };
  int target = 0;
  std::vector<Piece> pieces;
  int64_t dim = 0;
  std::optional<RowConversion> conversion = std::nullopt;
};

// Rows of a target that become its own when they are converted.
struct ConvertedRead {
  int target = 0;
  int64_t first_row = 0;
  std::vector<WholeRead::Piece> pieces;  // together, along dimension 0
  RowConversion conversion;
};

// Elements that a file has twice, under two names.
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
  std::vector<ConvertedRead> converted;  // of a target in order of rows
};

struct LoadPlanOptions {
  // Refuse what is missing, and what nobody asks for.
  bool strict = true;
  // What else is missing stays as it is, by name; null: nothing.
  std::function<bool(const std::string& name)> saves = nullptr;
  // Null: each tensor as it is, by its own name.
  TensorMapping mapping = nullptr;
  // Of a file, that are converted at once; at least one row is.
  int64_t converted_bytes = int64_t{8} << 20;
};

// InvalidArgument lists everything that does not fit at once: what is missing,
// unexpected, of another shape, or of a dtype that would be cut off: only
// floating point becomes other floating point, or is converted, and complex
// other complex. Eight-bit floating-point numbers become others only with the
// scale that is beside them: NAME_scale or NAME_scale_inv, which both multiply.
absl::StatusOr<LoadPlan> PlanLoad(const Catalog& catalog,
                                  absl::Span<const LoadTarget> targets,
                                  const LoadPlanOptions& options);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_LOAD_PLAN_H_
