#include "fsdp/schedule/testing/memory_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::testing {

RaceDetector::RaceDetector(int num_ranks)
    : clocks_(num_ranks, Clock(num_ranks, 0)) {
  for (int rank = 0; rank < num_ranks; ++rank) clocks_[rank][rank] = 1;
}

int RaceDetector::AddCell() {
  cells_.emplace_back();
  cells_.back().read_at.assign(clocks_.size(), 0);
  return static_cast<int>(cells_.size()) - 1;
}

RaceDetector::Access RaceDetector::Read(int rank, int cell) {
  Cell& at = cells_[cell];
  at.read_at[rank] = clocks_[rank][rank];
  const bool follows = at.written_at <= clocks_[rank][at.writer];
  return {at.value, follows ? -1 : at.writer};
}

RaceDetector::Access RaceDetector::Write(int rank, int cell, int value) {
  Cell& at = cells_[cell];
  Access access{value};
  if (at.written_at > clocks_[rank][at.writer]) access.other_rank = at.writer;
  for (size_t other = 0; other < clocks_.size(); ++other) {
    if (at.read_at[other] > clocks_[rank][other]) {
      access.other_rank = static_cast<int>(other);
    }
  }
  at.value = value;
  at.writer = rank;
  at.written_at = clocks_[rank][rank];
  at.read_at.assign(clocks_.size(), 0);
  return access;
}

RaceDetector::Clock RaceDetector::Release(int rank) {
  Clock clock = clocks_[rank];
  ++clocks_[rank][rank];
  return clock;
}

void RaceDetector::Acquire(int rank, const Clock& clock) {
  for (size_t other = 0; other < clock.size(); ++other) {
    clocks_[rank][other] = std::max(clocks_[rank][other], clock[other]);
  }
}

void RaceDetector::Barrier() {
  std::vector<Clock> arrivals;
  arrivals.reserve(clocks_.size());
  for (size_t rank = 0; rank < clocks_.size(); ++rank) {
    arrivals.push_back(Release(static_cast<int>(rank)));
  }
  for (size_t rank = 0; rank < clocks_.size(); ++rank) {
    for (const Clock& clock : arrivals) {
      Acquire(static_cast<int>(rank), clock);
    }
  }
}

void RaceDetector::ForgetReads() {
  for (Cell& cell : cells_) cell.read_at.assign(clocks_.size(), 0);
}
namespace {

std::multiset<int> Without(std::multiset<int> gradients,
                           const std::set<int>& doomed) {
  for (int gradient : doomed) gradients.erase(gradient);
  return gradients;
}

void MoveTo(std::multiset<int>& to, std::multiset<int>& from) {
  to.merge(from);
}

}  // namespace

MemoryModel::MemoryModel(std::vector<ScheduledUnit> units,
                         const ScheduleOptions& options, Sharing sharing,
                         int num_ranks)
    : options_(options),
      scheduled_(std::move(units)),
      ranks_(num_ranks),
      num_ranks_(num_ranks),
      units_(scheduled_.size()) {
  for (size_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    unit.in_place = scheduled_[i].shares_memory && sharing == Sharing::kInPlace;
    unit.common = scheduled_[i].shares_memory && !unit.in_place;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      unit.shards.push_back(ranks_.AddCell());
      unit.parts.push_back(ranks_.AddCell());
    }
  }
}

void MemoryModel::Happens(const Event& event, const Actions& actions) {
  if (!violation_.empty()) return;
  event_ = ToString(event);
  BeforeActions(event);
  for (const Action& action : actions) Do(action);
  AfterActions(event);
  Compute();
}

// --- Events -----------------------------------------------------------------

void MemoryModel::BeforeActions(const Event& event) {
  Unit& unit = units_[event.unit];
  switch (event.kind) {
    case EventKind::kPreForward:
      BeginForward(event);
      break;
    case EventKind::kPostForward:
      forwards_.pop_back();
      break;
    case EventKind::kPreBackward:
      in_backward_ = true;
      ++unit.backwards;
      unit.version_asked_for = -1;  // used
      break;
    case EventKind::kPostBackward:
      in_backward_ = true;
      unit.backwards = std::max(0, unit.backwards - 1);
      if (event.reduces) {
        unit.given = {num_gradients_};
        unit.expected.insert(num_gradients_++);
      }
      break;
    case EventKind::kEndOfBackward:
      for (Unit& any : units_) {
        any.backwards = 0;
        any.version_asked_for = -1;
      }
      break;
    case EventKind::kReset:
      GiveUp();
      break;
    case EventKind::kSetReduction:
      unit.synchronizes = event.synchronizes;
      unit.all_reduces = event.all_reduces;
      break;
    default:
      break;
  }
}

void MemoryModel::AfterActions(const Event& event) {
  Unit& unit = units_[event.unit];
  // A second request does not change the values.
  if (event.kind == EventKind::kUnshard && unit.version_asked_for < 0) {
    unit.version_asked_for = unit.version;
  }
  if (event.kind == EventKind::kPostBackward && !unit.given.empty()) {
    Violate(event.unit, "its gradients go nowhere");
  }
  if (event.kind == EventKind::kEndOfBackward) {
    in_backward_ = false;
    accumulates_ = !event.synchronizes;
    num_finished_ = num_gradients_;
    // A unit with which a forward still computes is not stepped.
    const bool waits = options_.step_in_backward && !forwards_.empty();
    CheckEndOfBackward(event.synchronizes && !waits);
  }
}

void MemoryModel::BeginForward(const Event& event) {
  Unit& unit = units_[event.unit];
  if (event.recomputes) {
    in_backward_ = true;
    unit.version_asked_for = -1;  // used
  } else {
    if (forwards_.empty()) BeginIteration();
    if (unit.iteration != iteration_) {
      unit.iteration = iteration_;
      unit.user_writes_at_forward = unit.user_writes;
      unit.due = unit.version_asked_for < 0 ? unit.version_at_start
                                            : unit.version_asked_for;
      unit.version_asked_for = -1;
    } else if (!unit.is_copy || unit.memory == Unit::Memory::kFree) {
      unit.due = unit.version_at_start;  // the request is used up
    }
  }
  forwards_.push_back(event.unit);
}

void MemoryModel::BeginIteration() {
  ++iteration_;
  in_backward_ = false;  // a backward that threw has no end
  for (Unit& unit : units_) {
    unit.backwards = 0;
    unit.version_at_start = unit.version;
  }
}

// Ignores what the iteration has computed and read. Its gradients, and those in
// reduction, may exist or not.
void MemoryModel::GiveUp() {
  forwards_.clear();
  in_backward_ = false;
  accumulates_ = false;
  for (const Reduction& reduction : reductions_) {
    Doom(units_[reduction.unit], reduction.gradients);
  }
  reductions_.clear();
  ranks_.ForgetReads();
  for (Unit& unit : units_) {
    unit.backwards = 0;
    unit.version_asked_for = -1;
    Doom(unit, {unit.expected.lower_bound(num_finished_), unit.expected.end()});
    // A unit requested before a write leaves no usable graph.
    if (unit.due != unit.version_at_start) unit.user_writes_at_forward = -1;
    // A step that was due does not come later.
    if (options_.step_in_backward) Doom(unit, unit.of_shard);
  }
}

void MemoryModel::Doom(Unit& unit, const Gradients& gradients) {
  for (int gradient : gradients) {
    unit.doomed.insert(gradient);
    unit.expected.erase(gradient);
  }
}

void MemoryModel::CheckEndOfBackward(bool synchronizes) {
  for (const Reduction& reduction : reductions_) {
    Violate(reduction.unit, "its reduction is in flight when backward ends");
  }
  for (size_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    const bool keeps_sums = scheduled_[i].replicated && !unit.all_reduces;
    if (synchronizes && unit.synchronizes && !keeps_sums) {
      if (!IsComplete(unit)) {
        Violate(static_cast<int>(i),
                "its gradients are not those of the backwards so far");
      } else if (options_.step_in_backward && !unit.expected.empty()) {
        Violate(static_cast<int>(i), "it has not stepped");
      }
      continue;
    }
    Gradients kept = unit.of_shard;
    kept.insert(unit.whole.begin(), unit.whole.end());
    kept.insert(unit.sums.begin(), unit.sums.end());
    if (Without(kept, unit.doomed) != unit.expected) {
      Violate(static_cast<int>(i),
              "its gradients are neither kept nor reduced");
    }
  }
}

// --- Actions ----------------------------------------------------------------

void MemoryModel::Do(const Action& action) {
  Unit& unit = units_[action.unit];
  switch (action.kind) {
    case ActionKind::kLoad:
      break;  // a hint
    case ActionKind::kGather:
    case ActionKind::kGatherCopy:
      if (unit.memory != Unit::Memory::kFree) {
        Violate(action.unit, "it is gathered while it is there");
      }
      unit.is_copy = action.kind == ActionKind::kGatherCopy;
      Gather(unit);
      break;
    case ActionKind::kWaitGather:
      if (unit.memory != Unit::Memory::kInFlight) {
        Violate(action.unit, "no gather of it is in flight");
      }
      unit.memory = Unit::Memory::kGathered;
      unit.reads_shards = false;
      AcquireAll(std::exchange(unit.gather_starts, {}));
      break;
    case ActionKind::kFree:
    case ActionKind::kShrink:
      if (unit.memory != Unit::Memory::kGathered) {
        Violate(action.unit, "it is freed without being gathered");
      }
      if (action.kind == ActionKind::kShrink) {
        unit.part_version = unit.gathered_version;
      }
      unit.memory = Unit::Memory::kFree;
      unit.version_asked_for = -1;
      break;
    case ActionKind::kDropPart:
      if (unit.part_version < 0) Violate(action.unit, "there is no part of it");
      if (unit.memory == Unit::Memory::kInFlight && !unit.is_copy &&
          !unit.reads_shards) {
        Violate(action.unit, "its part is dropped while a gather reads it");
      }
      unit.part_version = -1;
      break;
    case ActionKind::kAccumulate:
      if (unit.given.empty()) Violate(action.unit, "it has no gradients");
      MoveTo(unit.whole, unit.given);
      break;
    case ActionKind::kFillReduceBuffer:
      FillReduceBuffer(action.unit);
      break;
    case ActionKind::kReduce:
      Reduce(action.unit);
      break;
    case ActionKind::kReplicate:
      Replicate(action.unit);
      break;
    case ActionKind::kKeepSums:
      KeepSums(action.unit);
      break;
    case ActionKind::kReplicateSums:
      ReplicateSums(action.unit);
      break;
    case ActionKind::kWaitReduce:
      WaitReduce(action.unit);
      break;
    case ActionKind::kStep:
      Step(action.unit);
      break;
    case ActionKind::kOpenShards:
      ranks_.Barrier();
      for (Unit& any : units_) any.part_is_current = false;
      break;
    case ActionKind::kCloseShards:
      ranks_.Barrier();
      break;
  }
}

// In common memory, a gather moves nothing, and orders ranks only if they write
// their parts of a copy. Writing the same bytes again does no harm.
void MemoryModel::Gather(Unit& unit) {
  unit.memory = Unit::Memory::kInFlight;
  unit.reads_shards = false;
  if (unit.is_copy) {  // keeps its values, whoever writes
    unit.gathered_version = unit.version;
    return;
  }
  if (unit.common && !unit.part_is_current) {
    for (int rank = 0; rank < num_ranks_ && unit.copied_version != unit.version;
         ++rank) {
      const RaceDetector::Access access =
          ranks_.Write(rank, unit.parts[rank], unit.version);
      if (!access.ordered()) {
        Violate(static_cast<int>(&unit - units_.data()),
                absl::StrCat("rank ", rank,
                             " writes its part of the common copy, which rank ",
                             access.other_rank, " may be reading"));
      }
    }
    unit.copied_version = unit.version;
    unit.part_is_current = true;
    unit.gather_starts = ReleaseAll(unit);
  }
  if (unit.common || unit.in_place) return;
  unit.reads_shards = unit.part_version < 0;
  unit.gathered_version = unit.reads_shards ? unit.version : unit.part_version;
}

void MemoryModel::FillReduceBuffer(int unit) {
  if (static_cast<int>(reductions_.size()) >= options_.max_reduce_buffers) {
    Violate(unit, "it overwrites a reduce buffer that others may be reading");
  }
  Reduction reduction;
  reduction.unit = unit;
  MoveTo(reduction.gradients, units_[unit].whole);
  MoveTo(reduction.gradients, units_[unit].given);
  if (reduction.gradients.empty()) Violate(unit, "it has no gradients");
  reductions_.push_back(std::move(reduction));
}

void MemoryModel::Reduce(int unit) {
  Reduction* const reduction = Oldest(unit, false, false);
  if (reduction == nullptr) return Violate(unit, "no reduce buffer is filled");
  reduction->started = true;
  reduction->starts = ReleaseAll(units_[unit]);
}

void MemoryModel::Replicate(int unit) {
  Reduction* const reduction = Oldest(unit, true, false);
  if (reduction == nullptr || !scheduled_[unit].replicated) {
    return Violate(unit, "there is nothing to replicate");
  }
  reduction->replicating = true;
  AcquireAll(reduction->starts);
  MoveTo(reduction->gradients, units_[unit].sums);
}

void MemoryModel::KeepSums(int unit) {
  Reduction* const reduction = Oldest(unit, true, false);
  if (reduction == nullptr || !scheduled_[unit].replicated) {
    return Violate(unit, "it has no sums to keep");
  }
  AcquireAll(reduction->starts);
  MoveTo(units_[unit].sums, reduction->gradients);
  reductions_.erase(reductions_.begin() + (reduction - &reductions_.front()));
}

void MemoryModel::ReplicateSums(int unit) {
  Reduction reduction;
  reduction.unit = unit;
  reduction.started = true;
  reduction.replicating = true;
  MoveTo(reduction.gradients, units_[unit].sums);
  if (reduction.gradients.empty()) Violate(unit, "it has no sums");
  reductions_.push_back(std::move(reduction));
}

void MemoryModel::WaitReduce(int unit) {
  Reduction* const reduction = Oldest(unit, true, scheduled_[unit].replicated);
  if (reduction == nullptr) {
    return Violate(unit, "no reduction of it can be finished");
  }
  AcquireAll(reduction->starts);
  MoveTo(units_[unit].of_shard, reduction->gradients);
  reductions_.erase(reductions_.begin() + (reduction - &reductions_.front()));
}

void MemoryModel::Step(int unit) {
  Unit& stepped = units_[unit];
  for (const Reduction& reduction : reductions_) {
    if (reduction.unit == unit) Violate(unit, "it steps before it is reduced");
  }
  if (!IsComplete(stepped)) Violate(unit, "it steps without all gradients");
  if (stepped.of_shard.empty()) Violate(unit, "it steps without gradients");
  stepped.of_shard.clear();
  stepped.expected.clear();
  WriteShards(stepped);
}

// Returns clocks if the unit shares memory: other units' groups may have other
// ranks.
std::vector<RaceDetector::Clock> MemoryModel::ReleaseAll(const Unit& unit) {
  std::vector<RaceDetector::Clock> clocks;
  if (!unit.in_place && !unit.common) return clocks;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    clocks.push_back(ranks_.Release(rank));
  }
  return clocks;
}

void MemoryModel::AcquireAll(const std::vector<RaceDetector::Clock>& clocks) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (const RaceDetector::Clock& clock : clocks) ranks_.Acquire(rank, clock);
  }
}

MemoryModel::Reduction* MemoryModel::Oldest(int unit, bool started,
                                            bool replicating) {
  for (Reduction& reduction : reductions_) {
    if (reduction.unit == unit && reduction.started == started &&
        reduction.replicating == replicating) {
      return &reduction;
    }
  }
  return nullptr;
}

bool MemoryModel::IsComplete(const Unit& unit) const {
  return Without(unit.whole, unit.doomed).empty() &&
         Without(unit.sums, unit.doomed).empty() &&
         Without(unit.of_shard, unit.doomed) == unit.expected;
}

// --- What users do ----------------------------------------------------------

bool MemoryModel::MayWrite() const {
  return forwards_.empty() && !in_backward_ && !accumulates_;
}

void MemoryModel::Write() {
  event_ = "write";
  for (Unit& unit : units_) {
    WriteShards(unit);
    ++unit.user_writes;
  }
}

void MemoryModel::WriteShards(Unit& unit) {
  const int index = static_cast<int>(&unit - units_.data());
  if (unit.memory == Unit::Memory::kInFlight && unit.reads_shards) {
    Violate(index, "a shard is written while a gather reads it");
  }
  ++unit.version;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const RaceDetector::Access access =
        ranks_.Write(rank, unit.shards[rank], unit.version);
    if (!access.ordered()) {
      Violate(index,
              absl::StrCat("rank ", rank, " writes its shard, which rank ",
                           access.other_rank, " may be reading"));
    }
  }
}

bool MemoryModel::MayLook(int unit) const {
  return forwards_.empty() && !in_backward_ &&
         units_[unit].memory == Unit::Memory::kGathered &&
         units_[unit].version_asked_for >= 0;
}

void MemoryModel::Look(int unit) {
  event_ = "look";
  Read(unit, units_[unit].version_asked_for);
}

bool MemoryModel::IsOlderThanShards(int unit) const {
  const int asked_for = units_[unit].version_asked_for;
  return asked_for >= 0 && asked_for != units_[unit].version;
}

void MemoryModel::DropGradients() {
  for (Unit& unit : units_) {
    unit.whole.clear();
    unit.sums.clear();
    unit.of_shard.clear();
    unit.expected.clear();
    unit.doomed.clear();
  }
}

void MemoryModel::DropWholeGradients(int unit) {
  Doom(units_[unit], units_[unit].whole);
}

void MemoryModel::DropSums(int unit) { Doom(units_[unit], units_[unit].sums); }

// --- What ranks read --------------------------------------------------------

void MemoryModel::Compute() {
  const std::set<int> forwards(forwards_.begin(), forwards_.end());
  for (size_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    if (forwards.count(static_cast<int>(i)) == 0 && unit.backwards == 0) {
      continue;
    }
    if (unit.memory != Unit::Memory::kGathered) {
      Violate(static_cast<int>(i), "it computes and is not gathered");
      continue;
    }
    // If the user has written the parameters since, the graph has no right
    // values.
    if (unit.user_writes != unit.user_writes_at_forward) continue;
    Read(static_cast<int>(i), unit.due);
  }
}

void MemoryModel::Read(int unit, int due) {
  if (!units_[unit].is_copy && units_[unit].in_place) {
    ReadCells(unit, units_[unit].shards, due);
  } else if (!units_[unit].is_copy && units_[unit].common) {
    ReadCells(unit, units_[unit].parts, due);
  } else {
    CheckVersion(unit, units_[unit].gathered_version, due);
  }
}

void MemoryModel::ReadCells(int unit, const std::vector<int>& cells, int due) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (int of = 0; of < num_ranks_; ++of) {
      const RaceDetector::Access access = ranks_.Read(rank, cells[of]);
      if (!access.ordered()) {
        Violate(unit, absl::StrCat("rank ", rank, " reads what rank ",
                                   access.other_rank, " may be writing"));
      }
      CheckVersion(unit, access.value, due);
    }
  }
}

void MemoryModel::CheckVersion(int unit, int version, int due) {
  if (version == due) return;
  Violate(unit,
          absl::StrCat("the values of write ", version,
                       " are read, and those of write ", due, " are due"));
}

void MemoryModel::Violate(int unit, absl::string_view what) {
  if (!violation_.empty()) return;
  violation_ = absl::StrCat(event_, ": unit ", unit, ": ", what);
}

}  // namespace fsdp::testing
