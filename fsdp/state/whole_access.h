// Reserves a model's parameters for something other than its forward and
// backward, and gathers them between steps.
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
  WholeAccess(WholeAccess&& other) noexcept;
  WholeAccess& operator=(WholeAccess&&) = delete;
  ~WholeAccess();

 private:
  explicit WholeAccess(ShardedModel* model) : model_(model) {}

  ShardedModel* model_;
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
                                        const at::Tensor& shard,
                                        absl::string_view label);

// Returns this rank's shard of the gradients of `flat`, with zeros where there
// are none.
at::Tensor ShardOfGradients(const flat_param::FlatParameter& flat);

// Lends whole values to a caller until End(). After that the tensor and its
// views hold no memory, and raise an error that says what has ended. Not
// thread-safe.
class LentValues {
 public:
  // `values` is 1-D and contiguous and outlives End(). `until` names what ends:
  // "the scope of SummonFullParams()".
  LentValues(const at::Tensor& values, const std::string& until);

  // Has the same elements as `values`.
  const at::Tensor& tensor() const { return tensor_; }
  void End() { storage_.Empty(); }

 private:
  flat_param::GuardedStorage storage_;
  at::Tensor tensor_;
};

}  // namespace fsdp

#endif  // FSDP_STATE_WHOLE_ACCESS_H_
