// Lists this rank's values of a model by name, without copies; files are
// written from them and read into them.
#ifndef FSDP_STATE_MODEL_VALUES_H_
#define FSDP_STATE_MODEL_VALUES_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ranges/tensor_range.h"

namespace fsdp {

class ShardedModel;

struct ModelValues {
  // First this rank's ranges of the parameters, each once, by its first name,
  // in the order of named_parameters(). In a model that is not sharded these
  // are whole. Then what is whole on every rank of a sharded model and may
  // differ between ranks: parameters that are not sharded. Buffers are last.
  std::vector<TensorRange> all;
  size_t num_ranges = 0;
  size_t num_parameters = 0;
  // Maps further names of tied parameters to the first.
  std::map<std::string, std::string> aliases;

  absl::Span<const TensorRange> ranges() const {
    return absl::MakeConstSpan(all).first(num_ranges);
  }
  // All that an optimizer may step.
  absl::Span<const TensorRange> parameters() const {
    return absl::MakeConstSpan(all).first(num_parameters);
  }
  // The values that may differ between ranks.
  absl::Span<const TensorRange> others() const {
    return absl::MakeConstSpan(all).subspan(num_ranges);
  }
};

// Returns whether `parameter` is a wrapped module's own, which has values only
// while its unit computes.
bool IsOfShardedModel(const at::Tensor& parameter);

// Reads the values of `model`, whose wrapped module is `module`.
ModelValues ReadModelValues(const ShardedModel& model,
                            const torch::nn::Module& module);

// Gathers the whole tensors that `ranges` are parts of, one flat parameter at a
// time, and calls `visit` with the index of each range and its whole tensor,
// which is valid during the call. `ranges` are those of the model's parameters,
// each once at most, or of something that is laid out like them. Collective if
// there are any, which are the same on all ranks.
absl::Status ForEachWhole(
    const ShardedModel& model, absl::Span<const TensorRange> ranges,
    absl::FunctionRef<void(size_t range, const at::Tensor& whole)> visit);

// Replaces each range that is not row-major by an even part of the whole,
// row-major, as a copy, by ForEachWhole().
absl::Status MakeRowMajor(const ShardedModel& model,
                          std::vector<TensorRange>& ranges);

// Copies this rank's part of `whole`, which has the parameter's sizes, into
// `range`, whatever its storage order.
absl::Status TakeOwnPart(const at::Tensor& whole, const TensorRange& range);

}  // namespace fsdp

#endif  // FSDP_STATE_MODEL_VALUES_H_
