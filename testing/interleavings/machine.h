// Runs one execution of threads of ranks: every operation of theirs on shared
// memory, futexes, mutexes and the clock waits until the search lets it happen.
//
// Code that is compiled to be watched calls it by the hooks (hooks.cc); it does
// not see what other code does to shared memory.
#ifndef TESTING_INTERLEAVINGS_MACHINE_H_
#define TESTING_INTERLEAVINGS_MACHINE_H_

#include <setjmp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "testing/interleavings/arena.h"
#include "testing/interleavings/mutation.h"
#include "testing/interleavings/search.h"
#include "testing/interleavings/vector_clock.h"
#include "testing/interleavings/weak_memory.h"

namespace fsdp::interleavings {

// --- Numbers of the places that steps conflict on. Shared offsets are their
// own.

// These are whether a rank lives, and that only one is killed.
constexpr uint64_t LifeOf(int rank) {
  return uint64_t{1} << 60 | static_cast<uint64_t>(rank);
}
inline constexpr uint64_t kKilling = uint64_t{2} << 60;
inline constexpr uint64_t kClock = uint64_t{3} << 60;
// All mutexes of a rank are one place: they have no lasting names.
constexpr uint64_t MutexesOf(int rank) {
  return uint64_t{4} << 60 | static_cast<uint64_t>(rank);
}
// The place of who maps and offers the segment that begins there.
constexpr uint64_t SegmentAt(uint64_t offset) {
  return uint64_t{5} << 60 | offset;
}

struct TraceLine {
  int thread;
  int rank;
  const char* what;
  bool in_arena;  // `offset` is a place in it
  uint64_t offset = 0;
  uint64_t value = 0;
  bool is_old = false;  // a newer value was there
  uintptr_t site = 0;
};

// These are seq_cst, on 1, 2, 4 or 8 bytes, and nobody looks.
uint64_t RawLoad(uintptr_t address, int bytes);
void RawStore(uintptr_t address, int bytes, uint64_t value);
// Returns the old value, from which `modify` makes the new one.
uint64_t RawUpdate(uintptr_t address, int bytes,
                   uint64_t (*modify)(uint64_t old, uint64_t operand),
                   uint64_t operand);
bool RawCompareExchange(uintptr_t address, int bytes, uint64_t* expected,
                        uint64_t desired);

struct MachineOptions {
  // At most one of these ranks is killed, at any point.
  std::vector<int> mortal_ranks;
  // Nanoseconds that pass once, at any point; 0: never.
  int64_t time_jump = 0;
  // FUTEX_WAIT returns for no reason so often.
  int spurious_wakeups = 0;
  // A sleep until its time is over is a violation: others should have ended it.
  bool nobody_oversleeps = true;
};

class Fiber;

class Machine {
 public:
  using Order = std::memory_order;
  using Modify = uint64_t (*)(uint64_t old, uint64_t operand);

  Machine(MachineOptions options, const Mutation* mutation);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine();

  // Returns the machine whose threads this system thread runs, or null.
  static Machine* Current() { return current_; }

  // --- An execution ---------------------------------------------------------
  void Reset();
  void AddThread(int rank, std::function<void()> body);
  // Returns when all threads have ended, sleep for ever or are dead.
  void Run(Search& search);
  // The rank for which code runs that belongs to no thread.
  void set_rank(int rank) { rank_of_caller_ = rank; }

  // Reports what is wrong; only the first report is kept.
  void Violate(std::string what);
  const std::string& violation() const { return violation_; }
  // Writes a line for each thing that was done, without a thread's repeated
  // looks that see the same.
  std::string DescribeTrace() const;
  Candidates PendingSteps() const;
  // Returns whether all threads that live have ended, as the search wanted it.
  bool has_completed() const { return has_completed_; }
  int64_t num_steps() const { return num_steps_; }
  Arena& arena() { return arena_; }
  const Sites& sites() const { return sites_; }

  // --- What threads do; `site` is where in the program ----------------------
  uint64_t Load(uintptr_t address, int bytes, Order order, uintptr_t site);
  void Store(uintptr_t address, int bytes, uint64_t value, Order order,
             uintptr_t site);
  uint64_t Update(uintptr_t address, int bytes, Modify modify, uint64_t operand,
                  Order order, uintptr_t site);
  // No watched code does these, and they are not modelled.
  bool CompareExchange(uintptr_t address, int bytes, uint64_t* expected,
                       uint64_t desired);
  void Fence();
  void Access(uintptr_t address, int64_t bytes, bool writes, uintptr_t site);
  // The timeout is in nanoseconds from now on; -1: for ever.
  void FutexWait(uintptr_t address, uint32_t value, int64_t timeout,
                 uintptr_t site);
  void FutexWake(uintptr_t address, uintptr_t site);
  // Waits until nobody holds the mutex.
  void Lock(void* mutex);
  void Unlock(void* mutex);
  int64_t Now();  // ns
  // Comes before a look at, or a change of, something that belongs to `rank`,
  // or to the segment with this number.
  bool HasEnded(int rank);
  void TouchSegment(int number, bool writes);
  int current_rank() const;
  void EnterFunction(uintptr_t caller) {
    if (self_ < 0) return;
    Thread& thread = threads_[self_];
    if (thread.depth < kMaxDepth) thread.callers[thread.depth] = caller;
    ++thread.depth;
  }
  void LeaveFunction() {
    if (self_ >= 0) --threads_[self_].depth;
  }
  bool is_exploring() const { return mode_ == Mode::kExplore && self_ >= 0; }

 private:
  static constexpr int kMaxDepth = 128;
  enum class Mode {
    kDirect,   // operations just happen, before and after the threads run
    kExplore,  // the search decides
    kDrain,    // threads end as soon as they can, and nobody looks any more
  };
  enum class State { kReady, kAsleep, kLocking, kDone };
  struct Thread {
    std::unique_ptr<Fiber> fiber;
    int rank = 0;
    State state = State::kDone;
    Footprint next;
    uintptr_t awaited = 0;  // kAsleep: futex; kLocking: mutex
    int64_t wake_time = 0;
    int64_t ticks = 0;  // of the thread's clock
    // These are of the functions that are under way.
    int depth = 0;
    std::array<uintptr_t, kMaxDepth> callers;
  };
  struct Mutex {
    int holder = -1;
    VectorClock clock;
  };

  Thread& self() { return threads_[self_]; }
  int num_threads() const { return num_threads_; }
  Footprint FootprintOf(uint64_t place, bool writes) const;
  // Returns whether the search decides on an operation.
  bool IsWatched(uintptr_t address) const {
    return is_exploring() && arena_.Find(address).has_value();
  }
  uint64_t CheckedOffset(uintptr_t address);
  // Returns once the search wants the step to be taken; false: it drains.
  bool Step(const Footprint& footprint);
  bool BeforeAtomic(uintptr_t address, int bytes, bool writes, uintptr_t site);
  void Reschedule();
  void SwitchTo(int thread);
  void GoToMain();
  bool IsEnabled(int thread) const;
  bool AllDone() const;
  bool LetTimePass();
  void WakeSleepers();
  void ActAsEnvironment(int thread);
  void EndOfThread();
  void Drain();
  void CheckRace(uint64_t offset, int64_t bytes, bool writes, bool atomic,
                 uintptr_t site);
  // Returns the order of an operation there, after the mutation.
  Order OrderAt(uintptr_t site, Order order, Operation operation,
                uint64_t offset);
  bool IsDropped(uintptr_t site);
  const uintptr_t* callers_begin() const {
    return threads_[self_].callers.data();
  }
  const uintptr_t* callers_end() const {
    return callers_begin() + std::min(threads_[self_].depth, kMaxDepth);
  }
  void Record(const char* what);
  void RecordAt(const char* what, uint64_t offset, uint64_t value, bool is_old,
                uintptr_t site);

  // Every watched function reads it, and thread_local would add a wrapper.
  static __thread Machine* current_;

  const MachineOptions options_;
  const Mutation* const mutation_;
  Arena arena_;
  Sites sites_;
  std::vector<Thread> threads_;
  int num_threads_ = 0;
  jmp_buf main_;

  Search* search_ = nullptr;
  Mode mode_ = Mode::kDirect;
  bool is_launching_ = false;
  int self_ = -1;  // the thread that runs; -1: none
  int rank_of_caller_ = 0;
  WeakMemory memory_;
  std::unordered_map<void*, Mutex> mutexes_;
  bool is_dead_[Arena::kMaxRanks] = {};
  bool any_dead_ = false;
  bool time_has_jumped_ = false;
  bool has_completed_ = false;
  int64_t now_ = 0;
  int spurious_left_ = 0;
  int64_t num_steps_ = 0;
  std::string violation_;
  std::vector<TraceLine> trace_;
};

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_MACHINE_H_
