// Clocks that say how much of each other threads have seen.
#ifndef TESTING_INTERLEAVINGS_VECTOR_CLOCK_H_
#define TESTING_INTERLEAVINGS_VECTOR_CLOCK_H_

#include <algorithm>
#include <array>
#include <cstdint>

namespace fsdp::interleavings {

inline constexpr int kMaxThreads = 8;

// One event: the `time`th of `thread`. Time 0 is before everything.
struct Epoch {
  int thread = 0;
  uint32_t time = 0;
};

class VectorClock {
 public:
  uint32_t operator[](int thread) const { return times_[thread]; }
  uint32_t& operator[](int thread) { return times_[thread]; }

  bool Covers(Epoch event) const { return times_[event.thread] >= event.time; }

  void Join(const VectorClock& other) {
    for (int i = 0; i < kMaxThreads; ++i) {
      times_[i] = std::max(times_[i], other.times_[i]);
    }
  }

 private:
  std::array<uint32_t, kMaxThreads> times_{};
};

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_VECTOR_CLOCK_H_
