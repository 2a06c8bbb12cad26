// Memory as the C++ standard defines it: which older values a load may still
// see, and which plain accesses race.
//
// Stores to one location take effect in the order in which they are executed,
// and a load sees one that has been executed: what only load buffering could
// show is not seen. A seq_cst load sees no store older than the last seq_cst
// one; fences are not modelled. Release sequences are those of C++20:
// only read-modify-writes continue one.
#ifndef TESTING_INTERLEAVINGS_WEAK_MEMORY_H_
#define TESTING_INTERLEAVINGS_WEAK_MEMORY_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "testing/interleavings/vector_clock.h"

namespace fsdp::interleavings {

// Two plain accesses, or a plain and an atomic one, that nothing orders.
struct Race {
  uint64_t address;
  int other_thread;
  bool other_writes;
  uintptr_t other_site;  // where in the program
};

// Models one execution. Threads count from 0; addresses are any numbers.
class WeakMemory {
 public:
  using Order = std::memory_order;

  // Returns the stores that a load may see, by index into the location's
  // history: those that no interleaving shows without staleness, and the newest
  // one. `executed` is what `thread` follows in the order in which conflicting
  // operations were executed: a load that does not follow the next store could
  // have come before it, which another interleaving shows. `initial` is what
  // the location holds if nobody has stored there. With `is_futex` the kernel
  // looks, which follows all wake-ups of this futex.
  std::vector<int> Look(int thread, uint64_t address, Order order,
                        uint64_t initial, const VectorClock& executed,
                        bool is_futex);

  uint64_t Load(int thread, uint64_t address, Order order, int index);
  void Store(int thread, uint64_t address, Order order, uint64_t value,
             Epoch executed);
  // Returns the newest value; no Look() is needed.
  uint64_t Newest(uint64_t address, uint64_t initial);
  // Reads the newest value and stores `value`.
  void Update(int thread, uint64_t address, Order order, uint64_t value,
              Epoch executed);

  // `thread` wakes those who sleep on a futex, and one that has been woken goes
  // on. What is there before a wake-up is seen after it, as in Linux (its
  // memory-barriers.txt), but the wake-up orders no plain accesses: the
  // language knows nothing of it.
  void WakeFutex(int thread, uint64_t address);
  void LeaveFutex(int thread, uint64_t address);

  // Time has passed: all see what has been stored up to now.
  void Settle();

  // Makes a plain access, and returns what it races with, if anything. It looks
  // only at some words of more than a page.
  std::optional<Race> Access(int thread, uint64_t address, int64_t bytes,
                             bool writes, bool atomic, uintptr_t site);

  // Orders what all threads have done before what they do next, as between
  // threads that have been joined and others that are then started.
  void Synchronize();
  // A thread that acquires `clock` follows those that have released it, as when
  // a mutex goes from one to the other.
  void Release(int thread, VectorClock* clock);
  void Acquire(int thread, const VectorClock& clock);

 private:
  struct Stored {
    uint64_t value;
    Epoch by;
    VectorClock released;  // what a thread that acquires it follows
    Epoch executed;
  };
  struct Seen {
    uint32_t time;
    int index;
  };
  struct Location {
    std::vector<Stored> history;
    std::array<std::vector<Seen>, kMaxThreads> seen;
    int last_seq_cst = 0;
    int settled = 0;
    VectorClock wakes;
    // Looks in a row that have seen something old.
    std::array<int, kMaxThreads> old_looks{};
  };
  struct Touch {
    Epoch by;
    uint8_t mask;  // bytes of a word
    bool writes;
    bool atomic;
    uintptr_t site;
  };

  Location& At(uint64_t address, uint64_t initial);
  int OldestVisible(int thread, const Location& location, Order order,
                    bool is_futex) const;
  void See(int thread, Location& location, int index, Order order);
  std::optional<Race> TouchWord(int thread, uint64_t word, uint8_t mask,
                                const Touch& touch);
  Epoch Tick(int thread) { return {thread, ++clocks_[thread][thread]}; }

  std::array<VectorClock, kMaxThreads> clocks_;
  // The kernel has made these visible beyond that.
  std::array<VectorClock, kMaxThreads> shown_;
  std::unordered_map<uint64_t, Location> locations_;
  std::unordered_map<uint64_t, std::vector<Touch>> words_;
};

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_WEAK_MEMORY_H_
