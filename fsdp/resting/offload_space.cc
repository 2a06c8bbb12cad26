#include "fsdp/resting/offload_space.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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
  if (options.step_on == StepOn::kFaster) {
    FSDP_RETURN_IF_ERROR(space->ChooseWhereToStep());
  }
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
      step_on_(options.step_on),
      pages_(device),
      shards_(flats_.size(), nullptr),
      undo_entries_(flats_.size(), -1) {
  stores_.fill(-1);
}

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
    stores_[static_cast<int>(kind)] = offloader_->AddStore(*std::move(store));
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
  file.checksums = options_.checksums;
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
    const int store = offloader_->AddStore(std::move(kept.stores[i]));
    stores_[static_cast<int>(kinds[i])] = store;
    const absl::StatusOr<int> entry = Take(store, kStageRegion, sizeof(stage_));
    status.Update(entry.status());
    stage_entries_.push_back(entry.value_or(-1));
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
    const int store = static_cast<int>(kind);
    FSDP_ASSIGN_OR_RETURN(const int entry, Take(stores_[store], name, bytes));
    place =
        PlaceInStore(offloader_.get(), releases_.get(), entry, &changed_[store],
                     {activity_, NotedAs(kind, flat)}, shared_from_this());
  } else {
    const std::string region = absl::StrCat(ToString(kind), " of ", name);
    FSDP_RETURN_IF_ERROR(host_->Create(region, bytes));
    FSDP_ASSIGN_OR_RETURN(const absl::Span<char> memory, host_->Memory(region));
    place = PlaceOnHost(host_.get(), region, memory.data(), shared_from_this());
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

// All ranks measure at once, as they step at once; the slowest rank decides.
absl::Status OffloadSpace::ChooseWhereToStep() {
  step_on_ = StepOn::kDevice;
  if (!HasStreams(device_)) return absl::OkStatus();
  constexpr char kWhat[] = "measuring where to step the optimizer";
  const absl::StatusOr<StepRates> mine =
      MeasureStepRates(device_, Pages(), absl::Now() + timeout_);
  FSDP_RETURN_IF_ERROR(AgreeInTime(mine.status(), kWhat));
  FSDP_ASSIGN_OR_RETURN(
      const StepRates rates,
      SlowestStepRates(*mine, *world_, kWhat, absl::Now() + timeout_));
  step_on_ = FasterPlace(rates, options_);
  step_rates_ = rates.ToString();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<RestingMemory>> OffloadSpace::PlaceParameters(
    int flat, int64_t bytes, c10::Device device, at::Tensor resident) {
  const Tier tier = plan_.tier(flat, RestingKind::kParameters);
  std::shared_ptr<RestingMemory> memory;
  if (tier == Tier::kDevice) {
    if (!resident.defined()) {
      FSDP_RETURN_IF_ERROR(TorchToStatus("allocating a shard", [&] {
        resident =
            at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
      }));
    }
    memory = std::make_shared<RestingMemory>(std::move(resident),
                                             shared_from_this());
  } else {
    FSDP_ASSIGN_OR_RETURN(
        memory, Place(RestingKind::kParameters, flat,
                      RegionName(flat, flats_[flat].name), bytes, device));
  }
  shards_[flat] = memory.get();
  return memory;
}

absl::StatusOr<std::shared_ptr<RestingMemory>> OffloadSpace::PlaceGradients(
    int flat, int64_t bytes, c10::Device device) {
  const Tier tier = plan_.tier(flat, RestingKind::kGradients);
  if (tier == Tier::kDevice) return std::shared_ptr<RestingMemory>();
  return Place(RestingKind::kGradients, flat,
               RegionName(flat, flats_[flat].name), bytes, device);
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
  return step_on_ == StepOn::kHost && !shard.stays() &&
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
    if (stores_[kind] < 0) continue;
    stats.stores[kind] = offloader_->store(stores_[kind]).Stats();
  }
  stats.memory = offloader_->stats();
  return stats;
}

std::string OffloadSpace::Describe() const {
  std::string text = plan_.ToString();
  for (RestingKind kind : kRestingKinds) {
    const int store = stores_[static_cast<int>(kind)];
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
  if (!step_rates_.empty()) {
    absl::StrAppend(
        &text, "  stepped by the ",
        step_on_ == StepOn::kHost ? "host: " : "device: ", step_rates_, "\n");
  }
  return text;
}

}  // namespace fsdp
