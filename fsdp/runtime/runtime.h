// The data plane of FSDP: carries out the actions of a Schedule on flat
// parameters, memory for the whole of them and a communicator.
#ifndef FSDP_RUNTIME_RUNTIME_H_
#define FSDP_RUNTIME_RUNTIME_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/reducer.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

// Decides nothing: carries out each action of a Schedule. It owns the stream of
// gathers, the pool that they gather into, what is gathered or kept of it, and
// the fences of memory that ranks share; a Reducer owns what gradients are
// reduced in. It fills and empties the flat parameters, whose values it only
// reads. Not thread-safe.
//
// On a device with streams the host waits for nothing here. Forward and
// backward compute on the current stream. A second stream does gathers and what
// comes before them, a third reductions, what comes after them and units'
// steps. A unit without either stays on the first. When an action starts, its
// stream begins behind the computing one, so memory may go from stream to
// stream without further order. Computing waits for what kWaitGather names and,
// in EndOfBackward(), for all reductions.
class Runtime : public RuntimeCommon {
 public:
  // `communicator`, the group of all ranks, allocates memory. `timeout` limits
  // each wait. There is one of `fences` for each group whose units share
  // memory.
  Runtime(std::shared_ptr<comm::Communicator> communicator,
          std::vector<RuntimeUnit> units, absl::Duration timeout,
          std::vector<std::unique_ptr<comm::Fence>> fences = {});
  ~Runtime();

  // Knows of gradients. Callers use it for what is no action of the schedule.
  const Reducer& reducer() const { return reducer_; }
  Reducer& reducer() { return reducer_; }
  // Sets the dtype of the whole parameters from the next gather on. Call it
  // while the unit is empty.
  void SetPrecision(int unit, flat_param::Precision precision);
  // Returns whether the unit has gathered a copy, and not just shows its shard.
  bool HoldsCopy(int unit) const;

  // Ends the operations of this rank's groups and tells their ranks.
  void Abort(const absl::Status& reason);

  // Carries out `actions` in order, up to the first that fails. `gradients` are
  // for kFillReduceBuffer and kAccumulate, of the unit's parameters, flat after
  // flat; without any, only gradients that are kept whole are reduced.
  absl::Status Execute(absl::Span<const Action> actions,
                       absl::Span<const at::Tensor> gradients = {});

  // Call it before a forward: frees the memory of gradients that the user has
  // dropped, for activations. Backward allocates some again, which is nearly
  // free on a device with its own allocator, but not on the CPU, which has page
  // faults and keeps it. Logged steps keep it too, to use the same buffers.
  void DropUnusedGradients();

  // Call it after an error: empties all whole parameters, gives their memory
  // back and forgets what is in flight, without waiting. Gradients that a
  // forgotten reduction may still write, or that wait for a step in backward,
  // are gone. Those that are kept whole stay. In a capture nothing is `sent`:
  // then memory in flight is used again, as ranks whose capture succeeds use
  // theirs, since they allocate together.
  void DropEverything(bool sent = true);

  // --- Captured steps (step_capture.h), between steps ---------------------
  // Call it when the device has done all that it was given: later steps wait
  // for nothing of earlier ones, so no wait leads into a capture or out of it.
  void ForgetEarlierSteps();
  // Call these on the captured stream, at the beginning and at the end of a
  // capture: the runtime's streams are captured with it. ForkStreams() orders
  // them behind the current one, JoinStreams() the current one behind them.
  void ForkStreams();
  void JoinStreams();
  // Steps that begin with it and do the same use the same buffers.
  void BeginAlike();
  // Returns the memory that steps gather into, reduce from and keep gradients
  // in.
  std::vector<at::Tensor> StepMemory() const;
  // Adds what is carried out from now on to `log`; null ends it.
  void SetStepLog(StepLog* log) { step_log_ = log; }

  MemoryStats memory_stats() const {
    return {memory_.stats(), reducer_.memory_stats()};
  }

 private:
  struct Flat {
    const std::string& label;
    flat_param::FlatParameter& parameter;
    const at::Tensor& shared;
    bool shared_is_current = false;  // this rank's part, since OpenShards()
    at::Tensor memory = {};          // of a gather, in flight or done
    bool memory_is_pooled = false;   // else shared, or the shard itself
    std::unique_ptr<comm::Work> gather = nullptr;  // in flight
    DeviceEvent filled = {};                       // if nothing is in flight
    at::Tensor part = {};                          // after kShrink
  };

  absl::Status ExecuteOne(const Action& action,
                          absl::Span<const at::Tensor> gradients);
  // The actions of these names (schedule.h).
  absl::Status Gather(int unit);
  absl::Status GatherCopy(int unit);
  absl::Status WaitGather(int unit);
  void Free(int unit);
  void Shrink(int unit);
  absl::Status OpenShards();

  absl::Status GatherFlat(int unit, Flat& flat);
  absl::Status GatherShared(int unit, Flat& flat);
  bool ShowsShard(int unit, const Flat& flat) const;
  // Copies this rank's shard into its part of memory for the whole.
  absl::StatusOr<at::Tensor> CopyOwnShard(Flat& flat);
  absl::Status StartAllGather(int unit, Flat& flat, const at::Tensor& own);
  void ReleaseMemory(Flat& flat);
  absl::Status PassFences(absl::string_view what);
  // Returns where each flat parameter of the unit is gathered; null for
  // nowhere.
  std::vector<const void*> Addresses(int unit) const;

  const std::vector<std::unique_ptr<comm::Fence>> fences_;
  SideStream stream_;
  std::vector<std::vector<Flat>> flats_;  // per unit
  BufferPool memory_;
  Reducer reducer_;
  StepLog* step_log_ = nullptr;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_RUNTIME_H_
