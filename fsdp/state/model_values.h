// Lists this rank's values of a sharded model by name, without copies; files
// are written from them and read into them.
#ifndef FSDP_STATE_MODEL_VALUES_H_
#define FSDP_STATE_MODEL_VALUES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp {

class ShardedModel;

namespace flat_param {
class FlatParameter;
}  // namespace flat_param

// This rank's range of one parameter, in storage order.
struct ValueRange {
  std::string name;
  std::vector<int64_t> sizes;    // of the whole parameter
  std::vector<int64_t> strides;  // of the whole; they give its storage order
  int64_t begin;                 // in elements
  // 1-D, of the parameter's dtype, possibly empty; they may rest off the device
  // (fsdp/memory/resting_memory.h). Writing them changes the parameter.
  at::Tensor values;
  // The flat parameter that contains it; null if its model is not sharded.
  const flat_param::FlatParameter* flat = nullptr;
  int index = 0;  // in flat
  int unit = 0;
  // This rank's index among the ranks that hold the same range.
  int replica = 0;
  int replicas = 1;

  // Returns whether storage order is the order of elements in files.
  bool IsRowMajor() const;
};

// A value that is whole on every rank: a buffer, or a parameter that is not
// sharded.
struct WholeValue {
  std::string name;
  at::Tensor tensor;           // of the module
  c10::ScalarType file_dtype;  // its dtype without mixed precision
  bool is_buffer;
};

struct ModelValues {
  // Each once, by its first name, in the order of named_parameters().
  std::vector<ValueRange> parameters;
  // Maps further names of tied parameters to the first.
  std::map<std::string, std::string> aliases;
  std::vector<WholeValue> others;
};

// Returns whether `parameter` is a wrapped module's own, which has values only
// while its unit computes.
bool IsOfShardedModel(const at::Tensor& parameter);

// Cuts `count` things evenly into `parts`, and returns the range [first,
// second) of part `index`.
std::pair<int64_t, int64_t> EvenPart(int64_t count, int index, int parts);

// Reads the values of `model`, whose wrapped module is `module`.
ModelValues ReadModelValues(ShardedModel& model,
                            const torch::nn::Module& module);

// Replaces each range that is not row-major by an even part of the whole,
// row-major, as a copy. `values` may also be those of something else that is
// laid out like the parameter. Collective if there is such a range; it gathers
// one flat parameter at a time.
absl::Status MakeRowMajor(ShardedModel& model, std::vector<ValueRange>& ranges);

// Copies this rank's part of `whole`, which has the parameter's sizes, into
// `range`, whatever its storage order.
absl::Status TakeOwnPart(const at::Tensor& whole, const ValueRange& range);

// A range of one parameter, as some rank has cut it.
struct ParameterPiece {
  std::string name;
  std::vector<int64_t> sizes;    // of the whole parameter
  std::vector<int64_t> strides;  // of the whole; they give its storage order
  int64_t begin;                 // in storage order
  at::Tensor values;             // 1-D, possibly empty
};

// Fills `target`, which is 1-D, with the elements from `begin` on, taken from
// `pieces` of one parameter. NotFound, with nothing copied: no piece has an
// element; the text names the first.
absl::Status CopyFromPieces(absl::Span<const ParameterPiece* const> pieces,
                            int64_t begin, const at::Tensor& target);

}  // namespace fsdp

#endif  // FSDP_STATE_MODEL_VALUES_H_
