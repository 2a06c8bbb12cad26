// Reduces gradients of a backward into shards' gradients, and steps units in
// it.
#ifndef FSDP_RUNTIME_REDUCER_H_
#define FSDP_RUNTIME_REDUCER_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "comm/communicator.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/runtime_common.h"

namespace fsdp {

// Owns the stream of reductions, the pool of reduce buffers, reductions in
// flight, gradients that are kept whole, sums that are kept, and the memory of
// shards' gradients, which it attaches to the shards. Knows nothing of what is
// gathered. Not thread-safe.
class Reducer {
 public:
  // `common` must outlive this object.
  explicit Reducer(RuntimeCommon& common);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // --- The actions of these names (schedule.h) ----------------------------
  // `gradients` are of the unit's parameters, flat after flat; empty: only
  // those that are kept whole are reduced.
  absl::Status Accumulate(int unit, absl::Span<const at::Tensor> gradients);
  absl::Status FillReduceBuffer(int unit,
                                absl::Span<const at::Tensor> gradients);
  absl::Status Reduce(int unit);
  absl::Status Replicate(int unit);
  absl::Status KeepSums(int unit);
  absl::Status ReplicateSums(int unit);
  absl::Status WaitReduce(int unit);
  absl::Status Step(int unit);

  // Makes what is computed later wait for the gradients of this backward. Call
  // it after the last action of a backward.
  void EndOfBackward();
  // Call it in a backward that has failed: finishes the reductions in flight,
  // so that units that it has passed have their gradients, as LibTorch's leaves
  // would, and get nothing added later. DropEverything() drops what cannot be
  // finished. `all_reduces` says whether a replicated unit's sums are not only
  // kept.
  void FinishReductions(absl::FunctionRef<bool(int unit)> all_reduces);
  void DropUnusedGradients();  // as Runtime has it
  void DropWholeGradients();   // those that are kept whole
  bool HasWholeGradients(int unit) const;
  bool HasSums(int unit) const;
  // Call it after an error: no step will come, and the gradients that wait for
  // one are dropped, since the next backward would add to them.
  void DropUnstepped();
  // Call it after an error: forgets the reductions in flight, waiting for none.
  void DropEverything(bool sent);  // as Runtime has it

  // --- Between steps ------------------------------------------------------
  void SetHooks(RuntimeHooks hooks);
  const RuntimeHooks& hooks() const { return hooks_; }
  void SetScaling(GradientScaling scaling);
  // Returns what SetScaling() has set.
  GradientScaling scaling() const { return scaling_; }

  // These count what is trained at the moment, of a unit or of its flat
  // parameter `i`.
  int64_t reduce_buffer_bytes(int unit) const;
  int64_t reduce_buffer_bytes(int unit, int i) const {
    return flats_[unit][i].gradients.bytes();
  }
  int64_t shard_gradient_bytes(int unit, int i) const {
    return flats_[unit][i].gradients.shard_bytes();
  }
  // Returns whether the gradients become those of the shard without a buffer,
  // unless some were kept whole or have another dtype.
  bool TakesGradients(int unit, int i) const;
  // Returns where the buffers of the unit's reductions are, one for each flat
  // parameter; null for nowhere.
  std::vector<const void*> Addresses(int unit) const;
  // Returns how often the host has read flags of a device for the unit.
  int64_t flag_reads(int unit) const;
  const PoolStats& memory_stats() const { return memory_.stats(); }

  // --- Captured steps (Runtime), between steps ----------------------------
  void ForgetEarlierSteps() { memory_.ForgetUses(); }
  void BeginAlike();
  std::vector<at::Tensor> StepMemory() const;
  SideStream& stream() { return stream_; }  // of reductions

 private:
  struct Flat {
    size_t num_parameters;
    FlatGradients gradients;
    ReduceBuffer whole_gradients = {};  // after kAccumulate
    ReduceBuffer sums = {};             // a segment, after kKeepSums
  };
  struct Reduction {
    int unit;
    std::vector<ReduceBuffer> buffers;  // per flat
    std::vector<std::unique_ptr<comm::Work>> works;
    std::vector<bool> direct;  // into the shard's gradient
    bool replicating = false;
    bool is_sound = false;  // nothing of it has failed to start or to finish
  };

  // Makes the stream of reductions, behind the current one, the current one.
  class BesideScope;

  bool IsAlone(int unit) const { return common_.placement(unit).is_alone(); }
  void ChooseStreams();
  absl::Status ReduceFlat(int unit, size_t i, Reduction& reduction);
  bool ReducesDirectly(int unit, size_t i) const;
  absl::Status ReplicateFlat(int unit, size_t i, Reduction& reduction);
  absl::Status AwaitReduced(std::unique_ptr<comm::Work>& work);
  const std::string& Label(int unit, size_t i, const GradientLayout& layout);

  RuntimeCommon& common_;
  SideStream stream_;
  // By unit: whether the end of its reductions, and its steps, run beside what
  // computes: unless the unit is alone and its gradients are taken as they are.
  std::vector<bool> reduces_beside_;
  bool has_reduced_beside_ = false;       // in this backward
  std::vector<std::vector<Flat>> flats_;  // per unit
  std::deque<Reduction> reductions_;      // filled or in flight, oldest first
  RuntimeHooks hooks_;
  GradientScaling scaling_;
  // Labels of reductions of some of the parameters, by which are trained; per
  // unit and flat parameter.
  std::vector<std::vector<std::map<std::vector<bool>, std::string>>> labels_;
  std::set<int> awaits_step_;  // units whose gradients will be stepped
  ReduceMemory memory_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_REDUCER_H_
