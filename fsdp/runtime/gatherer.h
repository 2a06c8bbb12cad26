// Gathers parameters from shards into what units compute with.
#ifndef FSDP_RUNTIME_GATHERER_H_
#define FSDP_RUNTIME_GATHERER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/device_streams.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/runtime_common.h"

namespace fsdp {

// Owns the stream of gathers, the pool that they gather into, what is gathered
// or kept of it, and the fences of memory that ranks share. It fills and
// empties the flat parameters, whose values it only reads, and knows nothing of
// gradients. Not thread-safe.
class Gatherer {
 public:
  // `common` must outlive this object. There is one of `fences` for each group
  // whose units share memory.
  Gatherer(RuntimeCommon& common,
           std::vector<std::unique_ptr<comm::Fence>> fences);
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // --- The actions of these names (schedule.h) ----------------------------
  void Load(int unit);
  absl::Status Gather(int unit);
  absl::Status GatherCopy(int unit);
  absl::Status WaitGather(int unit);
  void Free(int unit);
  absl::Status Shrink(int unit);
  void DropPart(int unit);
  absl::Status OpenShards();
  absl::Status CloseShards();

  // Returns whether the unit has gathered a copy, and not just shows its shard.
  bool HoldsCopy(int unit) const;
  const SharedFlat& shared(int unit, int i) const {
    return flats_[unit][i].shared;
  }
  // Returns where each flat parameter of the unit is gathered; null for
  // nowhere.
  std::vector<const void*> Addresses(int unit) const;
  const PoolStats& memory_stats() const { return memory_.stats(); }

  // Call it after an error: empties all flat parameters and gives their memory
  // back, waiting for nothing.
  void DropEverything();

  // --- Captured steps (Runtime), between steps ----------------------------
  void ForgetEarlierSteps();
  void BeginAlike() { memory_.SortFree(); }
  std::vector<at::Tensor> StepMemory() const { return memory_.free_buffers(); }
  // ForkStream() orders the stream of gathers behind the current one,
  // JoinStream() the current one behind it.
  void ForkStream() { stream_.FollowCurrentStream(); }
  void JoinStream() { stream_.BlockCurrentStream(); }

 private:
  struct Flat {
    const std::string& label;
    flat_param::FlatParameter& parameter;
    SharedFlat shared;
    bool shared_is_current = false;  // this rank's part, since OpenShards()
    at::Tensor memory = {};          // of a gather, in flight or done
    bool memory_is_pooled = false;   // else shared, or the shard itself
    std::unique_ptr<comm::Work> gather = nullptr;  // in flight
    DeviceEvent filled = {};                       // if nothing is in flight
    at::Tensor part = {};                          // after kShrink
  };

  absl::Status GatherFlat(int unit, Flat& flat);
  absl::Status GatherShared(int unit, Flat& flat);
  bool ShowsShard(int unit, const Flat& flat) const;
  // Copies this rank's shard into its part of memory for the whole.
  absl::StatusOr<at::Tensor> CopyOwnShard(Flat& flat);
  absl::Status StartAllGather(int unit, Flat& flat, const at::Tensor& own);
  void ReleaseMemory(Flat& flat);
  absl::Status PassFences(absl::string_view what);

  RuntimeCommon& common_;
  const std::vector<std::unique_ptr<comm::Fence>> fences_;
  SideStream stream_;
  std::vector<std::vector<Flat>> flats_;  // per unit
  BufferPool memory_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GATHERER_H_
