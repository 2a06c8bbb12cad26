// The data plane of FSDP: carries out the actions of a Schedule on flat
// parameters, unsharded memory and a communicator.
#ifndef FSDP_RUNTIME_RUNTIME_H_
#define FSDP_RUNTIME_RUNTIME_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/runtime/step_log.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

class Gatherer;
class Reducer;

// Of one rank. `parameters` is memory of gathered parameters, `gradients` of
// reduce buffers; shards are not counted.
struct MemoryStats {
  BufferPool::Stats parameters;
  BufferPool::Stats gradients;
};

// Decides nothing: hands each action to a Gatherer, which owns what parameters
// are gathered into, or to a Reducer, which owns what gradients are reduced in,
// and logs it. Owns the units. Not thread-safe.
//
// On a device with streams nothing here makes the host wait. The stream that is
// current in forward and backward computes; gathers and what comes before them
// go to a second one, reductions and what comes after them to a third one,
// where the unit is also stepped. A unit that has nothing to gather or reduce
// is left to the first. Either of the others begins behind what has been given
// to the computing stream when an action starts, so that memory may go from one
// stream to the other without further order, and computing waits for what
// kWaitGather names and, in EndOfBackward(), for all reductions.
class Runtime {
 public:
  // Memory is allocated by `communicator`, the group of all ranks. `timeout`:
  // for each wait. `fences`: one for each group whose units share memory.
  Runtime(std::shared_ptr<comm::Communicator> communicator,
          std::vector<RuntimeUnit> units, absl::Duration timeout,
          std::vector<std::unique_ptr<comm::Fence>> fences = {});
  ~Runtime();

  int num_units() const { return common_.num_units(); }
  const std::string& name(int unit) const { return common_.name(unit); }
  absl::Span<const std::unique_ptr<flat_param::FlatParameter>> flats(
      int unit) const {
    return common_.units()[unit].flats;
  }
  // Whether what the unit has gathered is not the shard itself.
  bool HoldsCopy(int unit) const;
  int num_flats(int unit) const { return static_cast<int>(flats(unit).size()); }
  // Of the flat parameters.
  absl::Span<const GradientBufferOptions> gradients(int unit) const {
    return common_.units()[unit].gradients;
  }
  // Of what is trained now.
  int64_t reduce_buffer_bytes(int unit) const;
  // Of flat parameter `i`; shared() is without memory where it is not shared.
  int64_t reduce_buffer_bytes(int unit, int i) const;
  int64_t shard_gradient_bytes(int unit, int i) const;
  // Whether its gradients become those of the shard without a buffer, but where
  // some were kept whole, or are of another dtype.
  bool TakesGradients(int unit, int i) const;
  const SharedFlat& shared(int unit, int i) const;
  const Placement& placement(int unit) const { return common_.placement(unit); }
  comm::Communicator& communicator() const { return common_.communicator(); }
  absl::Duration timeout() const { return common_.timeout(); }
  // Of shards and all that is gathered.
  c10::Device device() const { return common_.device(); }

  void SetHooks(RuntimeHooks hooks);
  const RuntimeHooks& hooks() const;
  // Between steps.
  void SetGradientScaling(GradientScaling scaling);
  // The dtype of unsharded parameters from the next gather on; while the unit
  // is empty.
  void SetPrecision(int unit, flat_param::Precision precision);

  // Ends the operations of this rank's groups and tells their ranks.
  void Abort(const absl::Status& reason);

  // Carries out `actions` in order up to the first that fails. `gradients`:
  // for kFillReduceBuffer and kAccumulate, of the unit's parameters, flat after
  // flat; none: what is kept whole is all there is.
  absl::Status Execute(absl::Span<const Action> actions,
                       absl::Span<const at::Tensor> gradients = {});

  // The gradients of this backward are complete to what is computed from now
  // on. After the last action of a backward.
  void EndOfBackward();

  // Before a forward: lets the memory of gradients go that the user has
  // dropped, so that activations have it; backward takes some anew, which costs
  // a device with an allocator of its own next to nothing, and the CPU page
  // faults: it keeps them. Steps that are logged use the same buffers.
  void DropUnusedGradients();

  // Gives the gradients kept whole back.
  void DropWholeGradients();

  // In a backward that has failed: finishes the reductions in flight, so that
  // units that it has been through have their gradients, as LibTorch's leaves
  // would, and nothing is added to them later. What cannot be finished is left
  // for DropEverything().
  // `all_reduces`: whether the sums of a replicated unit are not only kept.
  void FinishReductions(absl::FunctionRef<bool(int unit)> all_reduces);

  // After an error: gives all unsharded memory back and forgets what is in
  // flight, waiting for none of it. The parameters are empty afterwards.
  // Gradients that a forgotten reduction may still write to are gone, and where
  // they are stepped in backward, those that have not been. What is kept whole
  // stays.
  void DropEverything();
  bool HasWholeGradients(int unit) const;
  bool HasSums(int unit) const;

  // The collectives since it was cleared. What gathers within the smaller
  // group is left out, since ranks make them together with theirs.
  OrderLog& order() { return common_.order(); }

  // --- Captured steps (step_capture.h), between steps ---------------------
  // When the device has done all that it was given: later steps wait for
  // nothing of earlier ones, so that no wait leads into a capture or out of it.
  void ForgetEarlierSteps();
  // At the beginning of a capture, and at its end, on the captured stream: the
  // runtime's streams are captured with it, too.
  void ForkStreams();
  void JoinStreams();
  // Steps that begin so and do the same use the same buffers.
  void BeginAlike();
  // What steps gather into, reduce from and keep gradients in.
  std::vector<at::Tensor> StepMemory() const;
  // Adds what is carried out from now on; null ends it.
  void SetStepLog(StepLog* log) { step_log_ = log; }

  MemoryStats memory_stats() const;

 private:
  absl::Status ExecuteAndLog(const Action& action,
                             absl::Span<const at::Tensor> gradients);
  absl::Status ExecuteOne(const Action& action,
                          absl::Span<const at::Tensor> gradients);
  StepRecord RecordOf(const Action& action) const;

  RuntimeCommon common_;
  const std::unique_ptr<Gatherer> gatherer_;
  const std::unique_ptr<Reducer> reducer_;
  StepLog* step_log_ = nullptr;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_H_
