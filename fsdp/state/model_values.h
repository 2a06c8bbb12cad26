// The values of a model between steps: access to all parameters for something
// other than forward and backward, gathering them, and this rank's values by
// name, without copies, from which files are written and into which they are
// read.
#ifndef FSDP_STATE_MODEL_VALUES_H_
#define FSDP_STATE_MODEL_VALUES_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"
#include "ranges/tensor_range.h"

namespace fsdp {

// Holds the access that ShardedModel::BeginWholeAccess() gives, as long as it
// lives.
class WholeAccess {
 public:
  // Begins access. Collective: if one rank refuses, all do. `what` names the
  // caller: "GatherStateDict()".
  static absl::StatusOr<WholeAccess> Begin(ShardedModel& model,
                                           absl::string_view what,
                                           bool reads_values = false);
  // Begins access on this rank alone, and sends nothing.
  static absl::StatusOr<WholeAccess> BeginAlone(ShardedModel& model,
                                                absl::string_view what);

 private:
  explicit WholeAccess(ShardedModel* model) : model_(model) {}

  struct Ends {
    void operator()(ShardedModel* model) const { model->EndWholeAccess(); }
  };
  std::unique_ptr<ShardedModel, Ends> model_;
};

// Runs `body`, which returns a Status or a StatusOr, with access and in
// NormalMode, since its tensors are kept. What it throws becomes the result,
// and the model's groups are aborted, since other ranks may be waiting.
template <typename Body>
auto InWholeAccess(ShardedModel& model, absl::string_view what,
                   const Body& body, bool reads_values = false)
    -> decltype(body()) {
  FSDP_ASSIGN_OR_RETURN(const WholeAccess access,
                        WholeAccess::Begin(model, what, reads_values));
  const NormalMode normal;
  decltype(body()) result = absl::UnknownError(what);
  absl::Status thrown = TorchToStatus(what, [&] { result = body(); });
  if (thrown.ok()) return result;
  model.Abort(thrown);
  return thrown;
}

// Returns the deadline of a wait that begins at this time.
absl::Time DeadlineOf(const ShardedModel& model);

// Gathers all ranks' shards of a unit's flat parameter, or of something that is
// laid out like it, into memory of its own: 1-D, layout.padded_numel()
// elements, in the shard's dtype. Collective over the ranks that the unit is
// sharded on. If it fails, the model's groups are aborted, since other ranks
// wait in other groups.
absl::StatusOr<at::Tensor> GatherShards(const ShardedModel& model, int unit,
                                        const at::Tensor& shard);

// InvalidArgument: there are no values in `tensor`, which is deferred, on meta
// or a sharded model's own.
absl::Status CheckHasValues(const at::Tensor& tensor);

// Returns this rank's shard of the gradients of `flat`, with zeros where there
// are none.
at::Tensor ShardOfGradients(const flat_param::FlatParameter& flat);

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
