// Operations of a Machine's threads on shared memory and on each other.
#include <cstddef>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "testing/interleavings/machine.h"

namespace fsdp::interleavings {
namespace {

// Nanoseconds beyond every deadline here.
constexpr int64_t kAges = int64_t{1000} * 1'000'000'000;

template <typename T>
T* At(uintptr_t address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<T*>(address);
}

// Calls `function` with a zero of that size.
template <typename Function>
auto OfSize(int bytes, const Function& function) {
  switch (bytes) {
    case 1:
      return function(uint8_t{});
    case 2:
      return function(uint16_t{});
    case 4:
      return function(uint32_t{});
    default:
      return function(uint64_t{});
  }
}

uint64_t Truncated(uint64_t value, int bytes) {
  return bytes == 8 ? value : value & ((uint64_t{1} << bytes * 8) - 1);
}

}  // namespace

uint64_t RawLoad(uintptr_t address, int bytes) {
  return OfSize(bytes, [=](auto zero) {
    const auto* place = At<decltype(zero)>(address);
    return uint64_t{__atomic_load_n(place, __ATOMIC_SEQ_CST)};
  });
}

bool RawCompareExchange(uintptr_t address, int bytes, uint64_t* expected,
                        uint64_t desired) {
  return OfSize(bytes, [=](auto zero) {
    using T = decltype(zero);
    T old = static_cast<T>(*expected);
    const bool done = __atomic_compare_exchange_n(
        At<T>(address), &old, static_cast<T>(desired), false, __ATOMIC_SEQ_CST,
        __ATOMIC_SEQ_CST);
    *expected = old;
    return done;
  });
}

void RawStore(uintptr_t address, int bytes, uint64_t value) {
  uint64_t old = RawLoad(address, bytes);
  while (!RawCompareExchange(address, bytes, &old, value)) {
  }
}

uint64_t RawUpdate(uintptr_t address, int bytes,
                   uint64_t (*modify)(uint64_t old, uint64_t operand),
                   uint64_t operand) {
  uint64_t old = RawLoad(address, bytes);
  while (!RawCompareExchange(address, bytes, &old, modify(old, operand))) {
  }
  return old;
}

uint64_t Machine::CheckedOffset(uintptr_t address) {
  const std::optional<Arena::Place> place = arena_.Find(address);
  FSDP_CHECK(place.has_value());
  const int rank = self().rank;
  const Arena::Segment* segment = arena_.Around(place->offset);
  if (place->rank != rank) {
    Violate(
        absl::StrCat("rank ", rank, " has an address of rank ", place->rank));
  } else if (segment == nullptr || segment->mappings[rank] == 0) {
    Violate(absl::StrCat("rank ", rank, " uses ",
                         arena_.FullNameOf(place->offset),
                         ", which it does not map"));
  }
  return place->offset;
}

// Returns false if the operation just happens and nobody looks.
bool Machine::BeforeAtomic(uintptr_t address, int bytes, bool writes,
                           uintptr_t site) {
  if (!IsWatched(address)) return false;
  const uint64_t offset = CheckedOffset(address);
  if (!Step(FootprintOf(offset, writes))) return false;
  CheckRace(offset, bytes, writes, /*atomic=*/true, site);
  return is_exploring();
}

uint64_t Machine::Load(uintptr_t address, int bytes, Order order,
                       uintptr_t site) {
  if (!BeforeAtomic(address, bytes, false, site)) {
    return RawLoad(address, bytes);
  }
  const uint64_t offset = arena_.Find(address)->offset;
  order = OrderAt(site, order, Operation::kLoad, offset);
  const std::vector<int> seen =
      memory_.Look(self_, offset, order, RawLoad(address, bytes),
                   search_->executed_before(), /*is_futex=*/false);
  const auto count = static_cast<int>(seen.size());
  const int way = search_->ChooseWay(count);
  const uint64_t value = memory_.Load(self_, offset, order, seen[way]);
  RecordAt("loads", offset, value, way + 1 < count, site);
  return value;
}

void Machine::Store(uintptr_t address, int bytes, uint64_t value, Order order,
                    uintptr_t site) {
  if (const auto place = arena_.Find(address)) {
    arena_.Touch(place->offset, bytes);
  }
  if (!BeforeAtomic(address, bytes, true, site)) {
    return RawStore(address, bytes, value);
  }
  const uint64_t offset = arena_.Find(address)->offset;
  order = OrderAt(site, order, Operation::kStore, offset);
  memory_.Newest(offset, RawLoad(address, bytes));
  memory_.Store(self_, offset, order, Truncated(value, bytes),
                search_->last_step(self_));
  RawStore(address, bytes, value);
  RecordAt("stores", offset, value, false, site);
}

uint64_t Machine::Update(uintptr_t address, int bytes, Modify modify,
                         uint64_t operand, Order order, uintptr_t site) {
  if (const auto place = arena_.Find(address)) {
    arena_.Touch(place->offset, bytes);
  }
  if (!BeforeAtomic(address, bytes, true, site)) {
    return RawUpdate(address, bytes, modify, operand);
  }
  const uint64_t offset = arena_.Find(address)->offset;
  order = OrderAt(site, order, Operation::kUpdate, offset);
  const uint64_t old = memory_.Newest(offset, RawLoad(address, bytes));
  if (IsDropped(site)) return old;
  const uint64_t value = Truncated(modify(old, operand), bytes);
  memory_.Update(self_, offset, order, value, search_->last_step(self_));
  RawStore(address, bytes, value);
  RecordAt("updates", offset, value, false, site);
  return old;
}

bool Machine::CompareExchange(uintptr_t address, int bytes, uint64_t* expected,
                              uint64_t desired) {
  if (IsWatched(address)) {
    Violate("a compare-and-exchange, which is not modelled");
  }
  return RawCompareExchange(address, bytes, expected, desired);
}

void Machine::Fence() {
  if (is_exploring()) Violate("a fence, which is not modelled");
}

void Machine::Access(uintptr_t address, int64_t bytes, bool writes,
                     uintptr_t site) {
  const std::optional<Arena::Place> place = arena_.Find(address);
  if (!place || bytes <= 0) return;
  if (writes) arena_.Touch(place->offset, bytes);
  if (!is_exploring()) return;
  CheckRace(CheckedOffset(address), bytes, writes, /*atomic=*/false, site);
}

void Machine::CheckRace(uint64_t offset, int64_t bytes, bool writes,
                        bool atomic, uintptr_t site) {
  const std::optional<Race> race =
      memory_.Access(self_, offset, bytes, writes, atomic, site);
  if (!race) return;
  Violate(absl::StrCat(
      "a data race at ", arena_.FullNameOf(race->address), ": thread ", self_,
      writes ? " writes" : " reads", " in ", FunctionAt(site),
      ", and nothing orders that and how thread ", race->other_thread,
      race->other_writes ? " writes" : " reads", " in ",
      FunctionAt(race->other_site)));
}

// Looks at the word and sleeps in one step, as the kernel does. It follows
// those who have woken sleepers of this word before; what else it sees is as
// old as what a load sees that is ordered with the accesses of this thread.
void Machine::FutexWait(uintptr_t address, uint32_t value, int64_t timeout,
                        uintptr_t site) {
  // Others end first: this thread may be waiting for them.
  if (mode_ == Mode::kDrain && self_ >= 0) return GoToMain();
  if (!IsWatched(address)) return;
  const uint64_t offset = CheckedOffset(address);
  Footprint footprint = FootprintOf(offset, true);
  if (options_.time_jump > 0) footprint.Add(kClock, false);
  if (!Step(footprint)) return;
  const std::vector<int> seen =
      memory_.Look(self_, offset, Order::memory_order_seq_cst,
                   RawLoad(address, sizeof(value)), search_->executed_before(),
                   /*is_futex=*/true);
  const auto count = static_cast<int>(seen.size());
  const int way = search_->ChooseWay(count + (spurious_left_ > 0 ? 1 : 0));
  if (way == count) {
    --spurious_left_;
    Record("is woken up for no reason");
    return;
  }
  const uint64_t word =
      memory_.Load(self_, offset, Order::memory_order_relaxed, seen[way]);
  RecordAt("waits for", offset, word, way + 1 < count, site);
  if (word != value) return;
  Thread& thread = self();
  thread.state = State::kAsleep;
  thread.awaited = offset;
  thread.wake_time =
      timeout < 0 ? std::numeric_limits<int64_t>::max() : now_ + timeout;
  thread.next = FootprintOf(offset, false);
  if (options_.time_jump > 0) thread.next.Add(kClock, false);
  thread.next.may_be_reordered = false;
  Reschedule();
  if (!is_exploring()) return;
  memory_.LeaveFutex(self_, offset);
  Record("wakes up");
}

void Machine::FutexWake(uintptr_t address, uintptr_t site) {
  if (!IsWatched(address)) return;
  const uint64_t offset = CheckedOffset(address);
  if (!Step(FootprintOf(offset, true))) return;
  OrderAt(site, Order::memory_order_seq_cst, Operation::kWake, offset);
  if (IsDropped(site)) return;
  memory_.WakeFutex(self_, offset);
  RecordAt("wakes", offset, 0, false, site);
  for (int i = 0; i < num_threads(); ++i) {
    Thread& thread = threads_[i];
    if (thread.state == State::kAsleep && thread.awaited == offset) {
      thread.state = State::kReady;
    }
  }
}

void Machine::Lock(void* mutex) {
  if (self_ < 0) return;
  if (is_exploring()) {
    self().state = State::kLocking;
    self().awaited = reinterpret_cast<uintptr_t>(mutex);
    Step(FootprintOf(MutexesOf(self().rank), true));
    self().state = State::kReady;
  }
  Mutex& locked = mutexes_[mutex];
  while (locked.holder >= 0 && !is_exploring()) GoToMain();
  FSDP_CHECK(locked.holder < 0);
  locked.holder = self_;
  if (is_exploring()) memory_.Acquire(self_, locked.clock);
}

void Machine::Unlock(void* mutex) {
  if (self_ < 0) return;
  if (is_exploring()) {
    Footprint footprint = FootprintOf(MutexesOf(self().rank), true);
    footprint.may_be_reordered = false;
    Step(footprint);
  }
  Mutex& unlocked = mutexes_[mutex];
  if (is_exploring()) {
    unlocked.clock = {};
    memory_.Release(self_, &unlocked.clock);
  }
  unlocked.holder = -1;
}

int64_t Machine::Now() {
  if (self_ < 0) return now_;
  if (mode_ == Mode::kDrain) {
    now_ += kAges;
    GoToMain();  // as in FutexWait()
  } else if (options_.time_jump > 0) {
    Step(FootprintOf(kClock, false));
  }
  return now_ + ++self().ticks;
}

bool Machine::HasEnded(int rank) {
  const auto& mortal = options_.mortal_ranks;
  const bool may_die =
      std::find(mortal.begin(), mortal.end(), rank) != mortal.end();
  if (is_exploring() && may_die) Step(FootprintOf(LifeOf(rank), false));
  return is_dead_[rank];
}

void Machine::TouchSegment(int number, bool writes) {
  const Arena::Segment* segment = arena_.segment(number);
  if (!is_exploring() || segment == nullptr) return;
  Step(FootprintOf(SegmentAt(segment->offset), writes));
}

Machine::Order Machine::OrderAt(uintptr_t site, Order order,
                                Operation operation, uint64_t offset) {
  const auto [found, is_new] = sites_.try_emplace(site);
  if (is_new) found->second = {operation, order, arena_.NameOf(offset)};
  if (operation == Operation::kUpdate) {
    // The callers that the update is for are near.
    constexpr int kNear = 3;
    const auto near =
        std::min<ptrdiff_t>(kNear, callers_end() - callers_begin());
    for (const uintptr_t* it = callers_end() - near; it != callers_end();
         ++it) {
      if (sites_.count(*it) > 0) continue;
      sites_[*it] = {Operation::kCall, order, arena_.NameOf(offset)};
    }
  }
  const bool mutated = mutation_ != nullptr && !mutation_->drops &&
                       mutation_->sites.count(site) > 0;
  return mutated ? mutation_->order : order;
}

bool Machine::IsDropped(uintptr_t site) {
  if (mutation_ == nullptr || !mutation_->drops) return false;
  const auto& sites = mutation_->sites;
  if (sites.count(site) > 0) return true;
  return std::any_of(callers_begin(), callers_end(),
                     [&](uintptr_t pc) { return sites.count(pc) > 0; });
}

void Machine::Record(const char* what) {
  trace_.push_back({self_, self().rank, what, false});
}

void Machine::RecordAt(const char* what, uint64_t offset, uint64_t value,
                       bool is_old, uintptr_t site) {
  trace_.push_back(
      {self_, self().rank, what, true, offset, value, is_old, site});
}

}  // namespace fsdp::interleavings
