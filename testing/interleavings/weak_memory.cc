#include "testing/interleavings/weak_memory.h"

#include <algorithm>

namespace fsdp::interleavings {
namespace {

// A store becomes visible after so many looks in a row at something older.
constexpr int kMaxOldLooks = 12;

constexpr int64_t kWordBytes = 8;
constexpr int64_t kPage = 4096;

bool Acquires(std::memory_order order) {
  return order == std::memory_order_acquire ||
         order == std::memory_order_consume ||
         order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}

bool Releases(std::memory_order order) {
  return order == std::memory_order_release ||
         order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}

}  // namespace

WeakMemory::Location& WeakMemory::At(uint64_t address, uint64_t initial) {
  Location& location = locations_[address];
  if (location.history.empty()) {
    location.history.push_back({initial, {}, {}, {}});
  }
  return location;
}

int WeakMemory::OldestVisible(int thread, const Location& location, Order order,
                              bool is_futex) const {
  VectorClock clock = clocks_[thread];
  clock.Join(shown_[thread]);
  int oldest = location.settled;
  if (order == std::memory_order_seq_cst) {
    oldest = std::max(oldest, location.last_seq_cst);
  }
  for (int i = static_cast<int>(location.history.size()) - 1; i > oldest; --i) {
    const Epoch by = location.history[i].by;
    if (clock.Covers(by) || (is_futex && location.wakes.Covers(by))) {
      oldest = i;
    }
  }
  for (int other = 0; other < kMaxThreads; ++other) {
    const std::vector<Seen>& seen = location.seen[other];
    for (auto it = seen.rbegin(); it != seen.rend(); ++it) {
      if (!clock.Covers({other, it->time})) continue;
      oldest = std::max(oldest, it->index);
      break;
    }
  }
  return oldest;
}

std::vector<int> WeakMemory::Look(int thread, uint64_t address, Order order,
                                  uint64_t initial, const VectorClock& executed,
                                  bool is_futex) {
  Location& location = At(address, initial);
  const int newest = static_cast<int>(location.history.size()) - 1;
  std::vector<int> stores;
  if (location.old_looks[thread] < kMaxOldLooks) {
    const int oldest = OldestVisible(thread, location, order, is_futex);
    for (int i = oldest; i < newest; ++i) {
      if (!executed.Covers(location.history[i + 1].executed)) break;
      stores.push_back(i);
    }
  }
  stores.push_back(newest);
  return stores;
}

void WeakMemory::See(int thread, Location& location, int index, Order order) {
  const Stored& stored = location.history[index];
  if (Acquires(order)) clocks_[thread].Join(stored.released);
  std::vector<Seen>& seen = location.seen[thread];
  if (seen.empty() || seen.back().index != index) {
    seen.push_back({Tick(thread).time, index});
  }
}

uint64_t WeakMemory::Load(int thread, uint64_t address, Order order,
                          int index) {
  Location& location = locations_[address];
  const bool is_old = index + 1 < static_cast<int>(location.history.size());
  location.old_looks[thread] = is_old ? location.old_looks[thread] + 1 : 0;
  See(thread, location, index, order);
  return location.history[index].value;
}

void WeakMemory::Store(int thread, uint64_t address, Order order,
                       uint64_t value, Epoch executed) {
  Location& location = locations_[address];
  const Epoch by = Tick(thread);
  location.history.push_back(
      {value, by, Releases(order) ? clocks_[thread] : VectorClock(), executed});
  if (order == std::memory_order_seq_cst) {
    location.last_seq_cst = static_cast<int>(location.history.size()) - 1;
  }
}

uint64_t WeakMemory::Newest(uint64_t address, uint64_t initial) {
  return At(address, initial).history.back().value;
}

void WeakMemory::Update(int thread, uint64_t address, Order order,
                        uint64_t value, Epoch executed) {
  Location& location = locations_[address];
  const int newest = static_cast<int>(location.history.size()) - 1;
  See(thread, location, newest, order);
  const VectorClock of_sequence = location.history[newest].released;
  Store(thread, address, order, value, executed);
  location.history.back().released.Join(of_sequence);
}

void WeakMemory::WakeFutex(int thread, uint64_t address) {
  VectorClock& wakes = locations_[address].wakes;
  wakes.Join(clocks_[thread]);
  wakes.Join(shown_[thread]);
}

void WeakMemory::LeaveFutex(int thread, uint64_t address) {
  shown_[thread].Join(locations_[address].wakes);
}

void WeakMemory::Settle() {
  for (auto& [address, location] : locations_) {
    location.settled = static_cast<int>(location.history.size()) - 1;
  }
}

std::optional<Race> WeakMemory::Access(int thread, uint64_t address,
                                       int64_t bytes, bool writes, bool atomic,
                                       uintptr_t site) {
  std::optional<Race> race;
  const Touch touch = {
      {thread, clocks_[thread][thread] + 1}, 0, writes, atomic, site};
  const uint64_t end = address + static_cast<uint64_t>(bytes);
  while (address < end && !race) {
    const uint64_t word = address / kWordBytes;
    const uint64_t stop = std::min(end, (word + 1) * kWordBytes);
    uint8_t mask = 0;
    for (uint64_t byte = address; byte < stop; ++byte) {
      mask = static_cast<uint8_t>(mask | 1 << byte % kWordBytes);
    }
    race = TouchWord(thread, word, mask, touch);
    address = stop;
    // Memory of more than a page is accessed from begin to end, so that one
    // word of each page will do.
    if (bytes > kPage) {
      address = std::max(address, std::min(end - 1, address / kPage * kPage +
                                                        uint64_t{kPage}));
    }
  }
  return race;
}

// An access counts as part of its thread's next event, which a release makes.
std::optional<Race> WeakMemory::TouchWord(int thread, uint64_t word,
                                          uint8_t mask, const Touch& touch) {
  std::vector<Touch>& touches = words_[word];
  bool is_there = false;
  for (Touch& other : touches) {
    if (other.by.thread == thread) {
      if (other.mask == mask && other.writes == touch.writes &&
          other.atomic == touch.atomic) {
        other.by = touch.by;
        other.site = touch.site;
        is_there = true;
      }
      continue;
    }
    if ((other.mask & mask) == 0 || (!other.writes && !touch.writes) ||
        (other.atomic && touch.atomic) || clocks_[thread].Covers(other.by)) {
      continue;
    }
    return Race{word * kWordBytes, other.by.thread, other.writes, other.site};
  }
  if (!is_there) {
    touches.push_back(touch);
    touches.back().mask = mask;
  }
  return std::nullopt;
}

void WeakMemory::Synchronize() {
  VectorClock all;
  for (int i = 0; i < kMaxThreads; ++i) {
    Tick(i);
    all.Join(clocks_[i]);
  }
  clocks_.fill(all);
}

void WeakMemory::Release(int thread, VectorClock* clock) {
  Tick(thread);
  clock->Join(clocks_[thread]);
}

void WeakMemory::Acquire(int thread, const VectorClock& clock) {
  clocks_[thread].Join(clock);
}

}  // namespace fsdp::interleavings
