// The time in which a model's parameters belong to something other than its
// forward and backward.
#ifndef FSDP_STATE_WHOLE_ACCESS_H_
#define FSDP_STATE_WHOLE_ACCESS_H_

#include <ATen/core/Tensor.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

// Ends with the object.
class WholeAccess {
 public:
  // Collective; what ShardedModel::BeginWholeAccess() refuses on one rank is
  // refused on all. `what` names the caller: "GatherStateDict()".
  static absl::StatusOr<WholeAccess> Begin(ShardedModel& model,
                                           absl::string_view what,
                                           bool reads_values = false);
  // The same, but a refusal is of this rank alone: nothing is sent.
  static absl::StatusOr<WholeAccess> BeginAlone(ShardedModel& model,
                                                absl::string_view what);
  WholeAccess(WholeAccess&& other) noexcept;
  WholeAccess& operator=(WholeAccess&&) = delete;
  ~WholeAccess();

 private:
  explicit WholeAccess(ShardedModel* model) : model_(model) {}

  ShardedModel* model_;
};

// Runs `body`, which returns a Status or a StatusOr, in such a time. What it
// throws becomes the result, and the ranks that may be waiting are ended: they
// do not know of it. In NormalMode: what it makes is kept.
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

// For a wait that begins now.
absl::Time DeadlineOf(const ShardedModel& model);

// Whole tensors out of the ranks' shards, for what happens between steps.

// All ranks' shards of one flat parameter of a unit, or of anything laid out
// like it, in memory of its own: 1-D, layout.padded_numel(), of the shard's
// dtype. Collective over the ranks that the unit is sharded on. When it fails
// the model's groups are aborted: other ranks wait in groups of theirs.
absl::StatusOr<at::Tensor> GatherShards(const ShardedModel& model, int unit,
                                        const at::Tensor& shard,
                                        absl::string_view label);

// This rank's shard of the gradients of `flat`, zero where there is none.
at::Tensor ShardOfGradients(const flat_param::FlatParameter& flat);

// Whole values that a caller gets to see for a time.

// A tensor over memory that is somebody else's, until End(): from then on it,
// and all views of it, raise an error that says what has ended, and hold no
// memory. Not thread-safe.
class LentValues {
 public:
  // `values`: 1-D and contiguous; outlives End(). `until`: "the scope of
  // SummonFullParams()".
  LentValues(const at::Tensor& values, const std::string& until);

  // Of the same elements as `values`.
  const at::Tensor& tensor() const { return tensor_; }
  void End() { storage_.Empty(); }

 private:
  flat_param::GuardedStorage storage_;
  at::Tensor tensor_;
};

}  // namespace fsdp

#endif  // FSDP_STATE_WHOLE_ACCESS_H_
