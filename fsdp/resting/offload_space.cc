#include "fsdp/resting/offload_space.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using offload::Offloader;
using offload::StoredBytes;

// The most regions of a flat parameter: an optimizer has several slots, and may
// have several groups.
constexpr int64_t kMaxPieces = 16;

// Drops the rollback if it is not possible. A step that reads something from a
// store can be undone if the states are in the store too; kept files always go
// back.
OffloadOptions WithPossibleRollback(OffloadOptions options,
                                    const OffloadPlan& plan) {
  const auto can_be_undone = [](const OffloadPlan::Tiers& tiers) {
    const auto is_away = [&](RestingKind kind) {
      return tiers[static_cast<int>(kind)] == Tier::kSsd;
    };
    return is_away(RestingKind::kOptimizer) ||
           !(is_away(RestingKind::kParameters) ||
             is_away(RestingKind::kGradients));
  };
  options.rollback =
      options.keep ||
      (options.rollback &&
       std::all_of(plan.flats.begin(), plan.flats.end(), can_be_undone));
  return options;
}

std::string AwayText(RestingKind kind, Tier tier, const std::string& name) {
  return absl::StrCat(
      "the ", ToString(kind), " of unit ", name, " rest on tier ",
      ToString(tier),
      " of Options::offload, and this tensor has values only "
      "while something of this library uses it: take fsdp::Resident::Of(tensor,"
      " fsdp::Use::kRead) before reading it, and step it by fsdp::",
      kFusedOptimizers);
}

// Returns the name of a flat parameter in a store: the end of its unit's name,
// which says more than its beginning, and its number.
std::string RegionName(int flat, absl::string_view unit) {
  constexpr size_t kMostOfName = 200;
  if (unit.size() > kMostOfName) unit.remove_prefix(unit.size() - kMostOfName);
  return absl::StrCat(unit, " #", flat);
}

// A place in a store. `owner` keeps the objects behind the pointers alive;
// `releases` are those of `offloader`. Every change sets `changed`, and waits
// are noted to `activity`, which may be null, as for `what`. The entry is
// removed together with the place, but a kept file gets it back unless a commit
// follows.
class StorePlace final : public RestingPlace {
 public:
  StorePlace(Offloader* offloader, DeferredReleases* releases, int entry,
             bool* changed, std::shared_ptr<comm::RankActivity> activity,
             std::string what, std::shared_ptr<const void> owner)
      : offloader_(offloader),
        releases_(releases),
        entry_(entry),
        changed_(changed),
        activity_(std::move(activity)),
        what_(std::move(what)),
        owner_(std::move(owner)) {}
  ~StorePlace() override {
    *changed_ = true;
    releases_->Settle(entry_).IgnoreError();
    offloader_->Remove(entry_).IgnoreError();
  }

  void Prefetch() override {
    releases_->Poll();
    if (!releases_->Has(entry_)) offloader_->Prefetch(entry_);
  }
  absl::StatusOr<char*> Acquire(Use use) override {
    if (use != Use::kRead) *changed_ = true;
    const comm::StoreWaitScope wait(activity_.get(),
                                    use == Use::kOverwrite
                                        ? comm::StoreWait::kRoom
                                        : comm::StoreWait::kRead,
                                    what_);
    static_assert(static_cast<int>(Use::kOverwrite) ==
                  static_cast<int>(Offloader::Use::kOverwrite));
    FSDP_ASSIGN_OR_RETURN(
        bytes_, releases_->Acquire(entry_, static_cast<Offloader::Use>(use)));
    return bytes_.data();
  }
  void MarkChanged() override {
    *changed_ = true;
    offloader_->MarkChanged(entry_);
  }
  void Release(const SharedEvent& used) override {
    releases_->Release(entry_, bytes_, used);
  }

 private:
  Offloader* const offloader_;
  DeferredReleases* const releases_;
  const int entry_;
  absl::Span<char> bytes_;  // while acquired
  bool* const changed_;
  const std::shared_ptr<comm::RankActivity> activity_;
  const std::string what_;
  const std::shared_ptr<const void> owner_;
};

// A place in `memory`, that of `region`, which is erased together with the
// place.
class HostPlace final : public RestingPlace {
 public:
  HostPlace(offload::HostStore* store, std::string region, char* memory,
            std::shared_ptr<const void> owner)
      : store_(store),
        region_(std::move(region)),
        memory_(memory),
        owner_(std::move(owner)) {}
  ~HostPlace() override { store_->Erase(region_).IgnoreError(); }

  void Prefetch() override {}
  absl::StatusOr<char*> Acquire(Use /*use*/) override { return memory_; }
  void MarkChanged() override {}
  void Release(const SharedEvent& /*used*/) override {}

 private:
  offload::HostStore* const store_;
  const std::string region_;
  char* const memory_;
  const std::shared_ptr<const void> owner_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<OffloadSpace>> OffloadSpace::Make(
    std::vector<RestingFlat> flats, OffloadPlan plan,
    const OffloadOptions& options, c10::Device device,
    std::shared_ptr<comm::Communicator> world, absl::Duration timeout) {
  auto space = std::shared_ptr<OffloadSpace>(
      new OffloadSpace(std::move(flats), std::move(plan), options, device,
                       std::move(world), timeout));
  FSDP_RETURN_IF_ERROR(space->AgreeInTime(space->MakeStores(),
                                          "making room for what is offloaded"));
  if (options.keep) FSDP_RETURN_IF_ERROR(space->OpenKept());
  return space;
}

OffloadSpace::OffloadSpace(std::vector<RestingFlat> flats, OffloadPlan plan,
                           const OffloadOptions& options, c10::Device device,
                           std::shared_ptr<comm::Communicator> world,
                           absl::Duration timeout)
    : flats_(std::move(flats)),
      plan_(std::move(plan)),
      options_(WithPossibleRollback(options, plan_)),
      device_(device),
      world_(std::move(world)),
      activity_(world_->activity()),
      timeout_(options.timeout.value_or(timeout)),
      pages_(device),
      shards_(flats_.size(), nullptr),
      undo_entries_(flats_.size(), -1) {}

int64_t OffloadSpace::CapacityOf(RestingKind kind, Tier tier) const {
  int64_t capacity = 0;
  for (size_t i = 0; i < flats_.size(); ++i) {
    const RestingFlat& flat = flats_[i];
    if (plan_.tier(static_cast<int>(i), kind) != tier) continue;
    capacity += StoredBytes(flat.of(kind));
    if (kind != RestingKind::kOptimizer) continue;
    capacity += kMaxPieces * offload::kPageBytes;
    if (IsSavedBeforeStep(plan_.flats[i], options_)) {
      capacity += StoredBytes(flat.parameters);
    }
  }
  return capacity;
}

absl::Status OffloadSpace::MakeStores() {
  int64_t on_host = 0;
  for (RestingKind kind : kRestingKinds) {
    on_host += CapacityOf(kind, Tier::kCpu);
  }
  if (on_host > 0) {
    FSDP_ASSIGN_OR_RETURN(host_, offload::HostStore::Make(on_host, Pages()));
  }
  if (plan_.buffer_bytes == 0) return absl::OkStatus();
  offload::OffloaderOptions memory;
  memory.memory_bytes = StoredBytes(plan_.buffer_bytes);
  memory.timeout = timeout_;
  memory.allocator = &Pages();
  FSDP_ASSIGN_OR_RETURN(offloader_, Offloader::Make(memory));
  releases_ = std::make_unique<DeferredReleases>(offloader_.get(), timeout_);
  for (RestingKind kind : kRestingKinds) {
    const int64_t capacity = CapacityOf(kind, Tier::kSsd);
    const bool kept = options_.keep && kind != RestingKind::kGradients;
    if (capacity == 0 || kept) continue;
    absl::StatusOr<std::unique_ptr<offload::ParamStore>> store;
    if (options_.make_store) {
      store = options_.make_store(kind, capacity);
    } else {
      store = offload::FileStore::Make(FileOf(kind));
    }
    if (!store.ok()) {
      return Annotate(store.status(),
                      absl::StrCat("making the store of ", ToString(kind)));
    }
    StoreOf(kind).index = offloader_->AddStore(*std::move(store));
  }
  return absl::OkStatus();
}

offload::FileStoreOptions OffloadSpace::FileOf(RestingKind kind) const {
  const bool stepped = kind != RestingKind::kGradients;
  offload::FileStoreOptions file;
  file.directory = options_.directory;
  file.capacity = CapacityOf(kind, Tier::kSsd);
  file.block_bytes = options_.block_bytes;
  file.queue_depth = options_.queue_depth;
  file.keep = options_.keep && stepped;
  file.rollback = options_.rollback && stepped && !file.keep;
  if (!file.keep) return file;
  file.capacity += offload::kPageBytes;  // the stage
  file.max_regions = std::max<int64_t>(
      file.max_regions, (kMaxPieces / 2) * static_cast<int64_t>(flats_.size()));
  file.name = KeptFileName(options_.name, ToString(kind), world_->rank(),
                           world_->world_size());
  file.owner = absl::StrCat("run ", options_.name, ", rank ", world_->rank(),
                            " of ", world_->world_size(), ", ", ToString(kind));
  return file;
}

absl::Status OffloadSpace::OpenKept() {
  std::vector<RestingKind> kinds;
  std::vector<offload::FileStoreOptions> files;
  for (RestingKind kind : kSteppedKinds) {
    if (CapacityOf(kind, Tier::kSsd) == 0) continue;
    kinds.push_back(kind);
    files.push_back(FileOf(kind));
  }
  if (files.empty()) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(KeptFiles kept,
                        OpenKeptFiles(files, *world_, timeout_));
  stage_ = kept.stage;
  session_ = kept.session;
  absl::Status status;
  for (size_t i = 0; i < kinds.size(); ++i) {
    Store& store = StoreOf(kinds[i]);
    store.index = offloader_->AddStore(std::move(kept.stores[i]));
    const absl::StatusOr<int> entry =
        Take(store.index, kStageRegion, sizeof(stage_));
    status.Update(entry.status());
    store.stage_entry = entry.value_or(-1);
  }
  return AgreeInTime(status, "opening kept files");
}

absl::StatusOr<int> OffloadSpace::Take(int store, const std::string& region,
                                       int64_t bytes) {
  if (options_.keep) {
    absl::StatusOr<int> entry = offloader_->Attach(store, region, bytes);
    if (!absl::IsNotFound(entry.status())) return entry;
  }
  return offloader_->Add(store, region, bytes);
}

std::string OffloadSpace::NotedAs(RestingKind kind, int flat) const {
  return absl::StrCat("unit ", flats_[flat].name, " (", ToString(kind), ")");
}

std::string OffloadSpace::NotedAs(RestingKind kind) const {
  return absl::StrCat("the model (", ToString(kind), ")");
}

absl::StatusOr<std::shared_ptr<RestingMemory>> OffloadSpace::Place(
    RestingKind kind, int flat, const std::string& name, int64_t bytes,
    c10::Device device) {
  const Tier tier = plan_.tier(flat, kind);
  std::unique_ptr<RestingPlace> place;
  if (tier == Tier::kSsd) {
    Store& store = StoreOf(kind);
    FSDP_ASSIGN_OR_RETURN(const int entry, Take(store.index, name, bytes));
    place = std::make_unique<StorePlace>(
        offloader_.get(), releases_.get(), entry, &store.changed, activity_,
        NotedAs(kind, flat), shared_from_this());
  } else {
    const std::string region = absl::StrCat(ToString(kind), " of ", name);
    FSDP_RETURN_IF_ERROR(host_->Create(region, bytes));
    FSDP_ASSIGN_OR_RETURN(const absl::Span<char> memory, host_->Memory(region));
    place = std::make_unique<HostPlace>(host_.get(), region, memory.data(),
                                        shared_from_this());
  }
  return std::make_shared<RestingMemory>(
      bytes, device, AwayText(kind, tier, name), std::move(place),
      CopiesFor(device), shared_from_this());
}

// The copies are made once, because a model is on one device.
std::shared_ptr<DeviceCopies> OffloadSpace::CopiesFor(c10::Device device) {
  if (!HasStreams(device)) return nullptr;
  if (copies_ == nullptr)
    copies_ =
        std::make_shared<DeviceCopies>(device, plan_.transfer_bytes, timeout_);
  return copies_;
}

absl::Status OffloadSpace::AgreeInTime(const absl::Status& mine,
                                       absl::string_view what) {
  return comm::Agree(*world_, mine, what,
                     absl::Now() + world_->default_timeout());
}

absl::StatusOr<std::shared_ptr<RestingMemory>> OffloadSpace::PlaceParameters(
    int flat, int64_t bytes, at::Tensor resident) {
  const Tier tier = plan_.tier(flat, RestingKind::kParameters);
  std::shared_ptr<RestingMemory> memory;
  if (tier == Tier::kDevice) {
    if (!resident.defined()) {
      FSDP_RETURN_IF_ERROR(TorchToStatus("allocating a shard", [&] {
        resident =
            at::empty({bytes}, at::TensorOptions(at::kByte).device(device_));
      }));
    }
    memory = std::make_shared<RestingMemory>(std::move(resident),
                                             shared_from_this());
  } else {
    FSDP_ASSIGN_OR_RETURN(
        memory, Place(RestingKind::kParameters, flat,
                      RegionName(flat, flats_[flat].name), bytes, device_));
  }
  shards_[flat] = memory.get();
  return memory;
}

absl::StatusOr<std::shared_ptr<RestingMemory>> OffloadSpace::PlaceGradients(
    int flat, int64_t bytes) {
  const Tier tier = plan_.tier(flat, RestingKind::kGradients);
  if (tier == Tier::kDevice) return std::shared_ptr<RestingMemory>();
  return Place(RestingKind::kGradients, flat,
               RegionName(flat, flats_[flat].name), bytes, device_);
}

int OffloadSpace::FlatOf(const RestingMemory& shard) const {
  const auto found = std::find(shards_.begin(), shards_.end(), &shard);
  FSDP_CHECK(found != shards_.end());
  return static_cast<int>(found - shards_.begin());
}

bool OffloadSpace::OptimizerRestsElsewhere(const RestingMemory& shard) const {
  return plan_.tier(FlatOf(shard), RestingKind::kOptimizer) != Tier::kDevice;
}

bool OffloadSpace::StepsOnHost(const RestingMemory& shard) const {
  return options_.step_on == StepOn::kHost && !shard.stays() &&
         OptimizerRestsElsewhere(shard);
}

absl::StatusOr<std::shared_ptr<RestingMemory>>
OffloadSpace::PlaceOptimizerState(const RestingMemory& shard,
                                  const std::string& what, int64_t bytes,
                                  c10::Device device) {
  const int flat = FlatOf(shard);
  const Tier tier = plan_.tier(flat, RestingKind::kOptimizer);
  if (tier == Tier::kDevice || bytes == 0) {
    return std::shared_ptr<RestingMemory>();
  }
  const std::string name =
      absl::StrCat(RegionName(flat, flats_[flat].name), ", ", what);
  absl::StatusOr<std::shared_ptr<RestingMemory>> memory =
      Place(RestingKind::kOptimizer, flat, name, bytes, device);
  if (absl::IsAlreadyExists(memory.status())) {
    return Annotate(memory.status(),
                    "another optimizer has states of these parameters: let it "
                    "go before this one's first step");
  }
  if (!absl::IsResourceExhausted(memory.status())) return memory;
  return Annotate(memory.status(),
                  absl::StrCat("OffloadOptions::optimizer_state says ",
                               options_.optimizer_state,
                               " bytes of optimizer state per byte of shard, "
                               "and the optimizers of this model have more"));
}

OffloadStats OffloadSpace::stats() const {
  OffloadStats stats;
  stats.kept_steps = step();
  if (offloader_ == nullptr) return stats;
  for (int kind = 0; kind < kNumRestingKinds; ++kind) {
    if (stores_[kind].index < 0) continue;
    stats.stores[kind] = offloader_->store(stores_[kind].index).Stats();
  }
  stats.memory = offloader_->stats();
  return stats;
}

std::string OffloadSpace::Describe() const {
  std::string text = plan_.ToString();
  for (RestingKind kind : kRestingKinds) {
    const int store = stores_[static_cast<int>(kind)].index;
    if (store < 0) continue;
    absl::StrAppend(&text, "  ", ToString(kind), " in ",
                    offloader_->store(store).Describe(), "\n");
  }
  if (host_ != nullptr) {
    absl::StrAppend(&text, "  cpu: ", host_->Describe(), "\n");
  }
  if (HasStreams(device_)) {
    absl::StrAppend(&text, "  memory for copies of ", device_.str(),
                    LocksPages() && pages_.locked()
                        ? ": locked\n"
                        : ": not locked, the host waits for copies\n");
  }
  return text;
}

absl::Status OffloadSpace::BeginStep(const absl::Status& mine) {
  saved_.clear();
  begun_ = false;
  absl::Status status = mine;
  status.Update(broken_);
  if (options_.keep) {
    status = AgreeInTime(status, "beginning a step of the optimizer");
  }
  // Changes made between steps get a stage of their own, the same on all ranks.
  BeginStage();
  if (options_.rollback && status.ok()) {
    status = options_.keep ? CommitStage() : FlushStepped();
  }
  begun_ = status.ok();
  return status;
}

// Begins a stage on all ranks, whether what follows succeeds or not, so that
// two different commits never have the same number.
void OffloadSpace::BeginStage() {
  for (Store& store : stores_) store.changed |= options_.keep;
  ++stage_.number;
  stage_.session = session_;
}

absl::Status OffloadSpace::CheckStepper(
    const std::shared_ptr<const void>& stepper) {
  if (!options_.keep) return absl::OkStatus();
  const std::shared_ptr<const void> present = stepper_.lock();
  if (present != nullptr && present != stepper) {
    return absl::FailedPreconditionError(
        "another optimizer has stepped this model, and with "
        "OffloadOptions::keep each step() is committed, so that a run could go "
        "on from between the two: give one optimizer several groups of "
        "parameters, or let the other one go first");
  }
  stepper_ = stepper;
  return absl::OkStatus();
}

// A file has its last two commits. After one that some ranks have and others
// lack, another would drop the last one that all ranks have.
absl::Status OffloadSpace::CommitStage() {
  absl::Status committed = AgreeInTime(FlushStepped(), "committing a step");
  if (!committed.ok()) {
    broken_ = absl::FailedPreconditionError(absl::StrCat(
        "kept files: a step of the optimizer could not be committed (",
        committed.message(),
        "): start the program again, which goes on from the last step that "
        "all ranks have committed"));
  }
  return committed;
}

absl::Status OffloadSpace::FlushStepped() {
  if (releases_ != nullptr) FSDP_RETURN_IF_ERROR(releases_->Settle());
  for (RestingKind kind : kSteppedKinds) {
    Store& store = StoreOf(kind);
    if (store.index < 0 || !store.changed) continue;
    if (options_.keep) {
      FSDP_ASSIGN_OR_RETURN(
          const absl::Span<char> bytes,
          offloader_->Acquire(store.stage_entry, Offloader::Use::kOverwrite));
      std::memcpy(bytes.data(), &stage_, sizeof(stage_));
      offloader_->Release(store.stage_entry);
    }
    const comm::StoreWaitScope wait(activity_.get(), comm::StoreWait::kWrite,
                                    NotedAs(kind));
    FSDP_RETURN_IF_ERROR(offloader_->Flush(store.index));
    store.changed = false;
  }
  return absl::OkStatus();
}

absl::Status OffloadSpace::SaveBeforeStep(RestingMemory& shard) {
  const int flat = FlatOf(shard);
  const bool is_saved = std::any_of(
      saved_.begin(), saved_.end(),
      [&](const Saved& saved) { return saved.entry == undo_entries_[flat]; });
  if (is_saved || !IsSavedBeforeStep(plan_.flats[flat], options_)) {
    return absl::OkStatus();
  }
  const at::Tensor values = shard.AsTensor(at::kByte);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(values, Use::kRead));
  int& entry = undo_entries_[flat];
  if (entry < 0) {
    FSDP_ASSIGN_OR_RETURN(
        entry, offloader_->Add(
                   StoreOf(RestingKind::kOptimizer).index,
                   absl::StrCat(RegionName(flat, flats_[flat].name), ", undo"),
                   shard.bytes()));
  }
  absl::StatusOr<absl::Span<char>> room;
  {
    const comm::StoreWaitScope wait(activity_.get(), comm::StoreWait::kRoom,
                                    NotedAs(RestingKind::kParameters, flat));
    room = releases_->Acquire(entry, Offloader::Use::kOverwrite);
  }
  FSDP_ASSIGN_OR_RETURN(const absl::Span<char> bytes, room);
  const at::Tensor copy = at::from_blob(bytes.data(), {shard.bytes()},
                                        at::TensorOptions(at::kByte));
  SharedEvent copied;
  const absl::Status status =
      TorchToStatus("saving a shard before its step", [&] {
        copy.copy_(values, /*non_blocking=*/LocksPages());
        if (!HasStreams(values.device())) return;
        auto event = std::make_shared<DeviceEvent>();
        event->Record(values.device());
        copied = std::move(event);
      });
  releases_->Release(entry, bytes, copied);
  FSDP_RETURN_IF_ERROR(status);
  saved_.push_back({shard.weak_from_this(), entry});
  return absl::OkStatus();
}

absl::Status OffloadSpace::EndStep(const absl::Status& mine) {
  absl::Status agreed = AgreeInTime(mine, "a step of the optimizer");
  if (agreed.ok()) {
    // No rank writes before all have committed. Otherwise a rank that is killed
    // would be at a stage to which the others cannot go back.
    if (options_.keep) {
      // A later run finds the parameters and states, with the step's number.
      ++stage_.finished_step;
      BeginStage();
      // The next step reports an error.
      if (!CommitStage().ok()) --stage_.finished_step;
    }
    begun_ = false;
    saved_.clear();
    return agreed;
  }
  if (!broken_.ok()) return agreed;
  if (!options_.rollback) {
    return Annotate(agreed,
                    "a step of the optimizer failed half-way, and without "
                    "OffloadOptions::rollback what was stepped stays so");
  }
  const absl::Status undone =
      AgreeInTime(Rollback(), "undoing a step of the optimizer");
  if (undone.ok()) {
    return Annotate(agreed,
                    "a step of the optimizer failed; parameters and optimizer "
                    "states are as before it");
  }
  broken_ = absl::FailedPreconditionError(
      "an earlier step of the optimizer could not be undone, and parameters "
      "and optimizer states are of different steps: make the model anew and "
      "load a checkpoint");
  return Annotate(agreed, absl::StrCat("a step of the optimizer failed and "
                                       "could not be undone (",
                                       undone.message(), ")"));
}

absl::Status OffloadSpace::Rollback() {
  // A step that has not begun has changed nothing.
  if (!std::exchange(begun_, false) || offloader_ == nullptr) {
    return absl::OkStatus();
  }
  FSDP_RETURN_IF_ERROR(releases_->Settle());
  // Restores saved shards before the file that holds them is rolled back.
  absl::Status status;
  for (const Saved& saved : saved_) {
    const std::shared_ptr<RestingMemory> shard = saved.shard.lock();
    if (shard == nullptr) continue;
    const absl::StatusOr<absl::Span<char>> bytes =
        releases_->Acquire(saved.entry, Offloader::Use::kRead);
    status.Update(bytes.status());
    if (!bytes.ok()) continue;
    status.Update(TorchToStatus("restoring a shard", [&] {
      const at::Tensor values = shard->AsTensor(at::kByte);
      const Resident resident =
          ValueOrThrow(Resident::Of(values, Use::kOverwrite));
      values.copy_(at::from_blob(bytes->data(), {shard->bytes()},
                                 at::TensorOptions(at::kByte)));
    }));
    offloader_->Release(saved.entry);
  }
  saved_.clear();
  // Waits for what was written to a device.
  status.Update(releases_->Settle());
  for (RestingKind kind : kSteppedKinds) {
    Store& store = StoreOf(kind);
    if (store.index < 0) continue;
    const comm::StoreWaitScope wait(activity_.get(), comm::StoreWait::kRead,
                                    NotedAs(kind));
    status.Update(offloader_->Rollback(store.index));
    store.changed = false;
  }
  return status;
}

}  // namespace fsdp
