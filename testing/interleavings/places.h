// Numbers of the places that steps conflict on. Shared offsets are their own.
#ifndef TESTING_INTERLEAVINGS_PLACES_H_
#define TESTING_INTERLEAVINGS_PLACES_H_

#include <cstdint>

namespace fsdp::interleavings {

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

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_PLACES_H_
