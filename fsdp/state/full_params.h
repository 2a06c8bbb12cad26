// Full parameters between steps: as a scope, one after the other, or gathered
// ahead of use. After summon_full_params of fairscale and PyTorch FSDP.
#ifndef FSDP_STATE_FULL_PARAMS_H_
#define FSDP_STATE_FULL_PARAMS_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp {

class ShardedModel;

struct SummonOptions {
  // Units inside the module, too; otherwise what it owns as a unit itself.
  bool recurse = true;
  // Keep what is written inside the scope: of each rank its own range, or with
  // rank0_only all that rank 0 has written. Otherwise it is lost, but for units
  // that are not sharded.
  bool writeback = true;
  // Only rank 0 gets values; on the others the parameters stay empty.
  bool rank0_only = false;
  bool offload_to_cpu = false;
  // The parameters have their gradients, which are written back as well.
  bool with_grads = false;
};

// While it lives, the parameters of the module are ordinary leaves with their
// values in full precision, in memory of their own, under their own names;
// forward, backward and another such scope are refused. Tensors handed out lose
// their values at its end: clone what has to outlive it. All ranks open and
// close it together. Must not outlive the module. Moved-from: closed.
class FullParamsScope {
 public:
  FullParamsScope(FullParamsScope&&) noexcept;
  FullParamsScope& operator=(FullParamsScope&&) noexcept;
  // Close(); what that returns is a warning then.
  ~FullParamsScope();

  // Writes back and shards again, also after an exception in the scope. Once.
  absl::Status Close();

 private:
  friend absl::StatusOr<FullParamsScope> SummonFullParams(
      torch::nn::Module& module, const SummonOptions& options);
  class Impl;
  explicit FullParamsScope(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

// `module`: a sharded module, one inside it, or one with several sharded ones
// inside. With nothing sharded in it, this does nothing. Collective.
// On all ranks alike: FailedPrecondition inside a forward, a backward or
// another such scope; InvalidArgument for options that differ between ranks.
absl::StatusOr<FullParamsScope> SummonFullParams(
    torch::nn::Module& module, const SummonOptions& options = SummonOptions());

// Called for each parameter in turn, with its full value in full precision,
// valid during the call.
using FullParameterVisitor =
    std::function<absl::Status(const std::string& name, const at::Tensor&)>;

struct VisitOptions {
  // As in SummonOptions. Without writeback what the visitor writes is lost.
  bool writeback = false;
  bool rank0_only = false;
};

// The member of a sharded module. Holds one unit at a time, so that a model
// larger than memory can be read and edited. Collective; all ranks return an
// error when the visitor of one does, and nothing of that unit and later ones
// is written back.
absl::Status ForEachFullParameter(ShardedModel& model,
                                  const FullParameterVisitor& visit,
                                  const VisitOptions& options = VisitOptions());

// A unit that is gathered ahead of its forward, PyTorch's UnshardHandle. Wait()
// after the unit was used or freed gathers it again, until the next forward.
class UnshardHandle {
 public:
  UnshardHandle(std::shared_ptr<ShardedModel> model, int unit)
      : model_(std::move(model)), unit_(unit) {}

  // Returns when the parameters are there.
  absl::Status Wait();

 private:
  std::shared_ptr<ShardedModel> model_;
  int unit_;
};

// Starts to gather the unit that `module` is, not those inside it; its next
// forward finds it gathered. Between steps it gets the values of now, in memory
// of its own, and keeps them until it is used or freed, whatever is written to
// shards from now on, also before Wait(), and if it is called once more. A
// forward with grad refuses a unit whose shards were written meanwhile, since
// backward would gather others: Reshard() it after the optimizer's step. Inside
// a forward or backward, where shards stay as they are, this is a prefetch that
// ends with it. A unit that is not sharded and computes in the dtype it is
// stored in is its shard, whose writes it shows. FailedPrecondition: it is no
// unit. All ranks alike.
absl::StatusOr<UnshardHandle> Unshard(torch::nn::Module& module);
// Frees it. FailedPrecondition: it is no unit, or computes.
absl::Status Reshard(torch::nn::Module& module);

// One flat parameter of a unit, whole.
struct RebuiltParameter {
  std::string unit;
  at::Tensor flat;  // 1-D, with padding
  // Whether resharding gives its memory back: not that of a unit that is not
  // sharded and computes in the dtype it is stored in.
  bool safe_to_free;
};

// The member of a sharded module: Unshard() of all units, in the dtypes they
// compute in: returns what they have. Valid until the units are freed: by
// Reshard(), or by the next forward. Collective. fairscale's
// _rebuild_full_params.
absl::StatusOr<std::vector<RebuiltParameter>> RebuildFullParams(
    ShardedModel& model);

}  // namespace fsdp

#endif  // FSDP_STATE_FULL_PARAMS_H_
