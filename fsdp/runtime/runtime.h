// The data plane of FSDP: carries out the actions of a Schedule on flat
// parameters, unsharded memory and a communicator.
#ifndef FSDP_RUNTIME_RUNTIME_H_
#define FSDP_RUNTIME_RUNTIME_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "comm/communicator.h"
#include "comm/fence.h"
#include "comm/quantized/quantized_communicator.h"
#include "comm/work.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/gradient_layout.h"
#include "fsdp/runtime/order_log.h"
#include "fsdp/runtime/step_log.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

// The groups of ranks a unit lies on.
struct Placement {
  // What the unit is sharded over; of one rank: it is not.
  std::shared_ptr<comm::Communicator> shard;
  // All-reduces what has been reduce-scattered; null: nothing is replicated.
  std::shared_ptr<comm::Communicator> replicate;
  // Consecutive ranks of `shard` that gather after kShrink; null: none do.
  std::shared_ptr<comm::Communicator> part;
  // `shard` again, sending int8 as `quantization` says: what gathers parameters
  // and reduces gradients in training; null: `shard` does.
  std::shared_ptr<comm::Communicator> quantized = nullptr;
  comm::QuantizationOptions quantization = {};

  comm::Communicator& traffic() const {
    return quantized != nullptr ? *quantized : *shard;
  }
};

// Memory that the ranks of a unit's group have in common, for a flat parameter
// of the compute dtype: every rank computes with the same copy of it.
struct SharedFlat {
  at::Tensor memory;          // undefined: there is none
  bool holds_shards = false;  // the ranks' shards rest in it, side by side
};

// A unit's flat parameters, one for each pair of dtypes and whether they are
// frozen when the model is sharded; none for a root that owns nothing.
// `gradients` has one entry for each.
struct RuntimeUnit {
  std::string name;
  Placement placement;
  // One for each flat parameter; none: no memory is shared.
  std::vector<SharedFlat> shared;
  // What their shards lie in; null for memory of their own. None: all of it is.
  std::vector<std::shared_ptr<RestingMemory>> resting;
  std::vector<std::unique_ptr<flat_param::FlatParameter>> flats;
  std::vector<GradientBufferOptions> gradients;
};

// A reduce-scatter by the user's own means: with compression, for example.
// `whole` is 1-D, one segment per rank of `group`; afterwards `own`, this
// rank's segment of it, holds the sum. The last elements of each segment are
// counts that no compression may turn from or to zero.
struct ReduceScatterCall {
  const std::string& unit;
  comm::Communicator& group;
  at::Tensor whole;
  at::Tensor own;
};
using ReduceScatterHook =
    std::function<absl::StatusOr<std::unique_ptr<comm::Work>>(
        const ReduceScatterCall&)>;
// The same for the all-reduce over replicas, in place in `own`.
struct AllReduceCall {
  const std::string& unit;
  comm::Communicator& group;
  at::Tensor own;
};
using AllReduceHook = std::function<absl::StatusOr<std::unique_ptr<comm::Work>>(
    const AllReduceCall&)>;

struct RuntimeHooks {
  ReduceScatterHook reduce_scatter;  // unset: the communicator's
  AllReduceHook all_reduce;          // unset: the communicator's
  // At kStep, when all gradients of the unit's shards are there.
  std::function<absl::Status(int unit)> step;
};

// Of one rank. `parameters` is memory of gathered parameters, `gradients` of
// reduce buffers; shards are not counted.
struct MemoryStats {
  BufferPool::Stats parameters;
  BufferPool::Stats gradients;
};

// Decides nothing. Not thread-safe.
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

  int num_units() const { return static_cast<int>(units_.size()); }
  const std::string& name(int unit) const { return units_[unit].name; }
  absl::Span<const std::unique_ptr<flat_param::FlatParameter>> flats(
      int unit) const {
    return units_[unit].flats;
  }
  // Whether what the unit has gathered is not the shard itself.
  bool HoldsCopy(int unit) const;
  int num_flats(int unit) const {
    return static_cast<int>(units_[unit].flats.size());
  }
  // Of the flat parameters.
  absl::Span<const GradientBufferOptions> gradients(int unit) const {
    return units_[unit].gradients;
  }
  // Of what is trained now.
  int64_t reduce_buffer_bytes(int unit) const;
  // Of flat parameter `i`; shared() is without memory where it is not shared.
  int64_t reduce_buffer_bytes(int unit, int i) const {
    return flats_[unit][i].gradient_buffer.bytes();
  }
  int64_t shard_gradient_bytes(int unit, int i) const {
    return flats_[unit][i].gradient_buffer.shard_bytes();
  }
  // Whether its gradients become those of the shard without a buffer, but where
  // some were kept whole, or are of another dtype.
  bool TakesGradients(int unit, int i) const;
  const SharedFlat& shared(int unit, int i) const {
    return flats_[unit][i].shared;
  }
  const Placement& placement(int unit) const { return units_[unit].placement; }
  comm::Communicator& communicator() const { return *communicator_; }
  absl::Duration timeout() const { return timeout_; }
  // Of shards and all that is gathered.
  c10::Device device() const { return device_; }

  void SetHooks(RuntimeHooks hooks);
  const RuntimeHooks& hooks() const { return hooks_; }
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
  OrderLog& order() { return order_; }

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

  MemoryStats memory_stats() const {
    return {parameter_memory_.stats(), gradient_memory_.stats()};
  }

 private:
  struct Flat {
    std::string label;  // in collectives: the unit, and the dtype where needed
    flat_param::FlatParameter* parameter;
    GradientBuffer gradient_buffer;
    SharedFlat shared;
    bool shared_is_current;  // this rank's part, since shards opened
    at::Tensor memory;       // of a gather, in flight or done
    bool memory_is_pooled;   // else shared, or the shard itself
    std::unique_ptr<comm::Work> gather;  // in flight
    DeviceEvent filled;                  // where nothing is in flight
    at::Tensor part;                     // after kShrink
    ReduceBuffer whole_gradients;        // after kAccumulate
    ReduceBuffer sums;                   // a segment, after kKeepSums
    // In reductions of some of the parameters, by which are trained.
    std::map<std::vector<bool>, std::string> reduce_labels;
  };
  struct Reduction {
    int unit;
    std::vector<ReduceBuffer> buffers;  // per flat
    std::vector<std::unique_ptr<comm::Work>> works;
    std::vector<bool> direct;  // into the shard's gradient
    bool replicating = false;
    bool is_sound = false;  // nothing of it has failed to start or to finish
  };

  absl::Status ExecuteAndLog(const Action& action,
                             absl::Span<const at::Tensor> gradients);
  StepRecord RecordOf(const Action& action) const;
  int64_t FlagReads(int unit) const;
  absl::Status ExecuteOne(const Action& action,
                          absl::Span<const at::Tensor> gradients);
  absl::Status Gather(int unit);
  absl::Status GatherCopy(int unit);
  absl::Status GatherFlat(int unit, Flat& flat);
  absl::Status GatherShared(int unit, Flat& flat);
  bool ShowsShard(int unit, const Flat& flat) const;
  // This rank's part of memory for all.
  absl::StatusOr<at::Tensor> CopyOwnShard(Flat& flat);
  absl::Status StartAllGather(int unit, Flat& flat, const at::Tensor& own);
  absl::Status WaitGather(int unit);
  void Free(int unit);
  void ReleaseMemory(Flat& flat);
  absl::Status Shrink(int unit);
  bool IsAlone(int unit) const;
  void ChooseStreams();
  void ScaleAfterSums();
  // Bytes, or nothing: the pool's from now on.
  void AdoptGradient(const at::Tensor& memory);
  // Makes the stream of reductions the current one, behind what is given.
  class BesideScope;
  absl::StatusOr<at::Tensor> AcquireBuffer(int unit, Flat& flat,
                                           const GradientLayout& layout);
  absl::Status LayOut(Flat& flat, const GradientBuffer::Layout& layout,
                      ReduceBuffer& buffer);
  absl::Status Collect(int unit, Flat& flat,
                       absl::Span<const at::Tensor> gradients,
                       const GradientBuffer::Layout& layout,
                       ReduceBuffer& buffer);
  absl::Status Accumulate(int unit, absl::Span<const at::Tensor> gradients);
  absl::Status FillReduceBuffer(int unit,
                                absl::Span<const at::Tensor> gradients);
  absl::Status Reduce(int unit);
  absl::Status ReduceFlat(int unit, size_t i, Reduction& reduction);
  bool ReducesDirectly(int unit, size_t i) const;
  absl::Status Replicate(int unit);
  absl::Status KeepSums(int unit);
  absl::Status AddToSums(Flat& flat, const ReduceBuffer& buffer);
  absl::Status ReplicateSums(int unit);
  absl::Status StartAllReduce(int unit, Flat& flat, const ReduceBuffer& buffer,
                              std::unique_ptr<comm::Work>& work);
  absl::Status AwaitReduced(std::unique_ptr<comm::Work>& work);
  void ReleaseBuffer(ReduceBuffer& buffer, std::unique_ptr<comm::Work> reader);
  absl::Status WaitReduce(int unit);
  static const std::string& ReduceLabel(Flat& flat,
                                        const GradientLayout& layout);
  // Of one flat parameter. The buffer is left without what nobody gives back.
  absl::Status TakeMean(Flat& flat, bool was_sent, ReduceBuffer& buffer);
  // Pairs of a slice and its gradient.
  using HiddenGradients = std::vector<std::pair<at::Tensor, at::Tensor>>;
  HiddenGradients HideIncompleteGradients();
  absl::Status Step(int unit);
  void DropUnstepped();
  void Forget(std::unique_ptr<comm::Work>& work);
  absl::Status OpenShards();
  absl::Status PassFences(absl::string_view what);
  absl::Status Await(comm::Work& work) const;
  absl::Time Deadline() const { return absl::Now() + timeout_; }

  const std::shared_ptr<comm::Communicator> communicator_;
  const std::vector<RuntimeUnit> units_;
  const absl::Duration timeout_;
  const std::vector<std::unique_ptr<comm::Fence>> fences_;
  const c10::Device device_;
  SideStream gather_stream_;
  SideStream reduce_stream_;
  // Per unit: whether what its reductions end with, and its steps, run beside
  // what computes. The gradients of others are taken as they are.
  std::vector<bool> reduces_beside_;
  bool has_reduced_beside_ = false;       // in this backward
  std::vector<std::vector<Flat>> flats_;  // per unit
  std::deque<Reduction> reductions_;      // filled or in flight, oldest first
  RuntimeHooks hooks_;
  std::set<int> awaiting_step_;  // units with gradients to be stepped
  OrderLog order_;
  StepLog* step_log_ = nullptr;
  BufferPool parameter_memory_;
  BufferPool gradient_memory_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_H_
