// This rank's values of a sharded model by name, where they are: what files are
// written from and read into. Nothing is copied.
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
  std::vector<int64_t> strides;  // which give its storage order
  int64_t begin;                 // in elements
  // 1-D, of the parameter's dtype, maybe empty; may rest elsewhere
  // (fsdp/memory/resting_memory.h). Writing it changes the parameter.
  at::Tensor values;
  // Where the parameter lies; null where its model is not sharded.
  const flat_param::FlatParameter* flat = nullptr;
  int index = 0;  // in flat
  int unit = 0;
  // Which of the ranks that hold the same range this is.
  int replica = 0;
  int replicas = 1;

  // Whether storage order is the order of elements in files.
  bool IsRowMajor() const;
};

// Whole on every rank: a buffer, or a parameter that is not sharded.
struct WholeValue {
  std::string name;
  at::Tensor tensor;           // of the module
  c10::ScalarType file_dtype;  // that it has without mixed precision
  bool is_buffer;
};

struct ModelValues {
  // Each once, by its first name, in the order of named_parameters().
  std::vector<ValueRange> parameters;
  // Further names of tied parameters, and their first.
  std::map<std::string, std::string> aliases;
  std::vector<WholeValue> others;
};

// Whether `parameter` is that of a wrapped module itself, which has values only
// while its unit computes.
bool IsOfShardedModel(const at::Tensor& parameter);

// Of `count` things that `parts` share out evenly: the range [first, second) of
// part `index`.
std::pair<int64_t, int64_t> EvenPart(int64_t count, int index, int parts);

// `module` is the wrapped one of `model`.
ModelValues ReadModelValues(ShardedModel& model,
                            const torch::nn::Module& module);

// Puts an even part of the whole, row-major, in place of each of `ranges` that
// is not row-major: a copy. `values` may be of anything laid out like the
// parameter. Collective where there is one, and gathers one flat parameter at a
// time.
absl::Status MakeRowMajor(ShardedModel& model, std::vector<ValueRange>& ranges);

// `whole`, of the parameter's sizes, becomes the values of `range`, whatever
// its storage order.
absl::Status TakeOwnPart(const at::Tensor& whole, const ValueRange& range);

// Puts ranges of parameters together, whoever has cut them.

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

#endif  // FSDP_STATE_MODEL_VALUES_H_
