// Everything that a rank keeps of one model off its device: stores and memory
// for transfers. It also makes a step of the optimizer all or nothing.
#ifndef FSDP_RESTING_OFFLOAD_SPACE_H_
#define FSDP_RESTING_OFFLOAD_SPACE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/kept_files.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/resting/resting_places.h"
#include "offload/file_store.h"
#include "offload/host_store.h"
#include "offload/offloader.h"
#include "offload/page_memory.h"

namespace fsdp {

// Not thread-safe. It lives as long as any memory that it has placed.
class OffloadSpace : public std::enable_shared_from_this<OffloadSpace> {
 public:
  // Makes the space of a model on `device`. Collective: an error of any rank,
  // such as a full disk, is returned by all.
  static absl::StatusOr<std::shared_ptr<OffloadSpace>> Make(
      std::vector<RestingFlat> flats, OffloadPlan plan,
      const OffloadOptions& options, c10::Device device,
      std::shared_ptr<comm::Communicator> world, absl::Duration timeout);

  const OffloadPlan& plan() const { return plan_; }
  // Returns the number of optimizer steps in kept files (OffloadOptions::keep).
  // A new model starts with the number and the parameters of earlier runs.
  int64_t step() const { return stage_.finished_step; }
  bool keeps() const { return options_.keep; }
  absl::Duration timeout() const { return timeout_; }

  // Returns memory for the shard of flat parameter `flat`, in the plan's order.
  // A shard that stays on the device lies in `resident`, if that is defined.
  absl::StatusOr<std::shared_ptr<RestingMemory>> PlaceParameters(
      int flat, int64_t bytes, at::Tensor resident);
  // Returns memory for its gradients, or null if they stay on the device.
  absl::StatusOr<std::shared_ptr<RestingMemory>> PlaceGradients(int flat,
                                                                int64_t bytes);
  // Returns memory for optimizer states of parameters in `shard`, which is of
  // this space, to be used on `device`; null if they stay on the shard's
  // device. It holds zeros, or what an earlier run kept under the name `what`.
  absl::StatusOr<std::shared_ptr<RestingMemory>> PlaceOptimizerState(
      const RestingMemory& shard, const std::string& what, int64_t bytes,
      c10::Device device);

  bool OptimizerRestsElsewhere(const RestingMemory& shard) const;
  // Returns whether the host steps `shard`; see OffloadOptions::step_on.
  bool StepsOnHost(const RestingMemory& shard) const;

  // --- A step of the optimizer ---------------------------------------------
  // Makes `stepper` the one whose steps are committed. FailedPrecondition: with
  // OffloadOptions::keep, while an earlier stepper still lives.
  absl::Status CheckStepper(const std::shared_ptr<const void>& stepper);
  // Begins a step: a rollback restores the present values. If `mine` is an
  // error, it is returned and nothing begins; with OffloadOptions::keep, where
  // this is collective, on no rank. FailedPrecondition: an earlier step could
  // not be undone or committed.
  absl::Status BeginStep(const absl::Status& mine = absl::OkStatus());
  // Saves `shard`, which stays in memory, for a rollback, if it needs that.
  // Call it before the step changes the shard.
  absl::Status SaveBeforeStep(RestingMemory& shard);
  // Ends a step. Collective; OK if `mine` is OK on all ranks. Otherwise, with
  // OffloadOptions::rollback, shards and states are as at BeginStep(); the
  // status says so, or why not. If a commit to kept files fails, no later step
  // begins: BeginStep() returns FailedPrecondition.
  absl::Status EndStep(const absl::Status& mine);

  // Zeros without stores.
  OffloadStats stats() const;
  // Describes the plan and the stores, in a line each.
  std::string Describe() const;

 private:
  // The kinds that a step of the optimizer changes and a rollback restores. It
  // only reads gradients.
  static constexpr std::array<RestingKind, 2> kSteppedKinds = {
      RestingKind::kParameters, RestingKind::kOptimizer};

  struct Store {
    int index = -1;        // in offloader_; -1: none
    bool changed = false;  // since its last successful Flush()
    int stage_entry = -1;  // of a kept file
  };
  struct Saved {
    std::weak_ptr<RestingMemory> shard;
    int entry;
  };

  OffloadSpace(std::vector<RestingFlat> flats, OffloadPlan plan,
               const OffloadOptions& options, c10::Device device,
               std::shared_ptr<comm::Communicator> world,
               absl::Duration timeout);

  bool LocksPages() const { return options_.lock_pages && HasStreams(device_); }
  offload::PageAllocator& Pages() {
    return LocksPages() ? pages_ : offload::PageAllocator::System();
  }
  Store& StoreOf(RestingKind kind) { return stores_[static_cast<int>(kind)]; }
  // Calls comm::Agree(). Ranks wait here for a rank whose disk is slower, as
  // long as for any collective.
  absl::Status AgreeInTime(const absl::Status& mine, absl::string_view what);
  absl::Status MakeStores();
  absl::Status OpenKept();
  offload::FileStoreOptions FileOf(RestingKind kind) const;
  absl::StatusOr<int> Take(int store, const std::string& region, int64_t bytes);
  void BeginStage();
  absl::Status CommitStage();
  absl::Status FlushStepped();
  int FlatOf(const RestingMemory& shard) const;
  int64_t CapacityOf(RestingKind kind, Tier tier) const;
  // Return the text of waits for one flat parameter, or for all.
  std::string NotedAs(RestingKind kind, int flat) const;
  std::string NotedAs(RestingKind kind) const;
  absl::StatusOr<std::shared_ptr<RestingMemory>> Place(RestingKind kind,
                                                       int flat,
                                                       const std::string& name,
                                                       int64_t bytes,
                                                       c10::Device device);
  std::shared_ptr<DeviceCopies> CopiesFor(c10::Device device);
  absl::Status Rollback();

  const std::vector<RestingFlat> flats_;
  const OffloadPlan plan_;
  const OffloadOptions options_;
  const c10::Device device_;
  const std::shared_ptr<comm::Communicator> world_;
  const std::shared_ptr<comm::RankActivity> activity_;  // may be null
  const absl::Duration timeout_;
  LockedPages pages_;
  std::unique_ptr<offload::HostStore> host_;       // of kCpu
  std::unique_ptr<offload::Offloader> offloader_;  // of kSsd; null without
  std::unique_ptr<DeferredReleases> releases_;     // of offloader_
  std::shared_ptr<DeviceCopies> copies_;           // of the model's device
  std::array<Store, kNumRestingKinds> stores_;     // by RestingKind
  KeptStage stage_;       // of the last commit that was tried
  uint64_t session_ = 0;  // of kept files
  std::vector<const RestingMemory*> shards_;  // of flats, known by address
  std::weak_ptr<const void> stepper_;         // of the last step, with keep
  bool begun_ = false;                        // a step is under way
  absl::Status broken_;                       // why no step may begin
  std::vector<Saved> saved_;                  // in the step under way
  std::vector<int> undo_entries_;             // of flats; -1: none yet
};

}  // namespace fsdp

#endif  // FSDP_RESTING_OFFLOAD_SPACE_H_
