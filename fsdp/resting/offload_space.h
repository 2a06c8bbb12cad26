// All that a rank keeps of one model outside its device: stores, memory for
// transfers, and what makes a step of the optimizer all or nothing.
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
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/memory/locked_pages.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/deferred_releases.h"
#include "fsdp/resting/kept_files.h"
#include "fsdp/resting/offload_plan.h"
#include "offload/file_store.h"
#include "offload/host_store.h"
#include "offload/offloader.h"
#include "offload/page_memory.h"

namespace fsdp {

// Not thread-safe. Lives as long as any memory of it.
class OffloadSpace : public std::enable_shared_from_this<OffloadSpace> {
 public:
  // For a model on `device`. Collective. Errors of any rank on all, such as no
  // space.
  static absl::StatusOr<std::shared_ptr<OffloadSpace>> Make(
      std::vector<RestingFlat> flats, OffloadPlan plan,
      const OffloadOptions& options, c10::Device device,
      std::shared_ptr<comm::Communicator> world, absl::Duration timeout);

  const OffloadPlan& plan() const { return plan_; }
  // With OffloadOptions::keep, how many steps of the optimizer the files are
  // of: when the model is made, those of earlier runs, whose parameters it has.
  int64_t step() const { return stage_.finished_step; }
  bool keeps() const { return options_.keep; }
  absl::Duration timeout() const { return timeout_; }

  // Memory for the shard of flat parameter `flat`, in the plan's order. One
  // that stays on the device lies in `resident`, where that is defined.
  absl::StatusOr<std::shared_ptr<RestingMemory>> PlaceParameters(
      int flat, int64_t bytes, c10::Device device, at::Tensor resident);
  // For its gradients; null where they stay on the device.
  absl::StatusOr<std::shared_ptr<RestingMemory>> PlaceGradients(
      int flat, int64_t bytes, c10::Device device);
  // For optimizer states of parameters in `shard`, which is of this space:
  // zeros, or what an earlier run has kept under the name `what`; for use on
  // `device`. Null where they stay on the shard's.
  absl::StatusOr<std::shared_ptr<RestingMemory>> PlaceOptimizerState(
      const RestingMemory& shard, const std::string& what, int64_t bytes,
      c10::Device device);

  bool OptimizerRestsElsewhere(const RestingMemory& shard) const;
  // Whether the host steps `shard`; see OffloadOptions::step_on.
  bool StepsOnHost(const RestingMemory& shard) const;

  // --- A step of the optimizer ---------------------------------------------
  // FailedPrecondition: with OffloadOptions::keep, when another stepper than
  // `stepper` lives whose steps are committed.
  absl::Status CheckStepper(const std::shared_ptr<const void>& stepper);
  // What rests is then as a rollback would leave it. Where `mine` is an error,
  // which is the result, this rank begins nothing. With OffloadOptions::keep
  // collective, and then no rank does. FailedPrecondition after a step that
  // could not be undone.
  absl::Status BeginStep(const absl::Status& mine = absl::OkStatus());
  // Before `shard`, which stays in memory, is changed by a step that may fail.
  absl::Status SaveBeforeStep(RestingMemory& shard);
  // Collective: OK when `mine` is OK on all ranks. Otherwise, with
  // OffloadOptions::rollback, shards and states are as at BeginStep(); the
  // status says so, or why not. What cannot be committed to kept files then is
  // by the next BeginStep(), or that fails.
  absl::Status EndStep(const absl::Status& mine);

  // Of the stores, by kind; without any, nothing.
  struct Stats {
    std::array<offload::StoreStats, kNumRestingKinds> stores;
    offload::OffloaderStats memory;
  };
  Stats stats() const;
  // A line for each store.
  std::string Describe() const;

 private:
  // What a step of the optimizer changes, and a rollback takes back. Gradients
  // are only read by it.
  static constexpr std::array<RestingKind, 2> kSteppedKinds = {
      RestingKind::kParameters, RestingKind::kOptimizer};

  struct Saved {
    std::weak_ptr<RestingMemory> shard;
    int entry;
  };

  OffloadSpace(std::vector<RestingFlat> flats, OffloadPlan plan,
               const OffloadOptions& options, c10::Device device,
               std::shared_ptr<comm::Communicator> world,
               absl::Duration timeout);

  bool LocksPages() const { return options_.lock_pages && HasStreams(device_); }
  offload::PageAllocator& Pages();
  // comm::Agree(). Ranks wait here for one whose disk is slower, as long as for
  // any collective.
  absl::Status AgreeInTime(const absl::Status& mine, absl::string_view what);
  absl::Status MakeStores();
  absl::Status ChooseWhereToStep();
  absl::Status OpenKept();
  offload::FileStoreOptions FileOf(RestingKind kind) const;
  absl::StatusOr<int> Take(int store, const std::string& region, int64_t bytes);
  void BeginStage();
  absl::Status FlushStepped();
  absl::Status Commit();
  int FlatOf(const RestingMemory& shard) const;
  int64_t CapacityOf(RestingKind kind, Tier tier) const;
  absl::StatusOr<std::unique_ptr<offload::ParamStore>> MakeStore(
      RestingKind kind, int64_t capacity) const;
  // Whose waits are noted: those for flat parameter `flat`, or all.
  std::string NotedAs(RestingKind kind, int flat) const;
  std::string NotedAs(RestingKind kind) const;
  absl::StatusOr<std::shared_ptr<RestingMemory>> Place(RestingKind kind,
                                                       int flat,
                                                       const std::string& name,
                                                       int64_t bytes,
                                                       c10::Device device);
  std::shared_ptr<DeviceCopies> CopiesFor(c10::Device device);
  absl::Status Rollback();
  absl::Status RestoreSaved();

  const std::vector<RestingFlat> flats_;
  const OffloadPlan plan_;
  const OffloadOptions options_;
  const c10::Device device_;
  const std::shared_ptr<comm::Communicator> world_;
  const std::shared_ptr<comm::RankActivity> activity_;  // may be null
  const absl::Duration timeout_;
  StepOn step_on_;          // never kFaster
  std::string step_rates_;  // why; empty where that was not asked
  LockedPages pages_;
  std::unique_ptr<offload::HostStore> host_;       // of kCpu
  std::unique_ptr<offload::Offloader> offloader_;  // of kSsd; null without
  std::unique_ptr<DeferredReleases> releases_;     // of offloader_
  std::shared_ptr<DeviceCopies> copies_;      // of the device that asks first
  std::array<int, kNumRestingKinds> stores_;  // of offloader_; -1: none
  // Since the last Flush() that ended well.
  std::array<bool, kNumRestingKinds> changed_ = {};
  std::vector<int> stage_entries_;  // of kept files
  KeptStage stage_;                 // of the last commit that was tried
  uint64_t session_ = 0;            // of kept files
  std::vector<const RestingMemory*> shards_;  // of flats, known by address
  std::weak_ptr<const void> stepper_;         // of the last step, with keep
  bool begun_ = false;                        // a step, and not ended
  absl::Status broken_;                       // a step was not undone
  std::vector<Saved> saved_;                  // in the step under way
  std::vector<int> undo_entries_;             // of flats; -1: none yet
};

}  // namespace fsdp

#endif  // FSDP_RESTING_OFFLOAD_SPACE_H_
