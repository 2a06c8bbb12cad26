// Keeps account of which parts of a store are taken.
#ifndef OFFLOAD_EXTENTS_H_
#define OFFLOAD_EXTENTS_H_

#include <cstdint>
#include <map>
#include <optional>

namespace fsdp::offload {

// Gives out pieces of [0, capacity), the first that is large enough. A value
// type; thread-compatible.
class Extents {
 public:
  explicit Extents(int64_t capacity);

  // Returns where the piece starts; nothing if no free piece is large enough. 0
  // bytes take no space.
  std::optional<int64_t> Take(int64_t bytes);
  // Takes the piece that starts at `offset`; false if it is not free.
  bool TakeAt(int64_t offset, int64_t bytes);
  // Gives back a piece that was taken.
  void Give(int64_t offset, int64_t bytes);

  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t peak_used() const { return peak_used_; }
  int64_t LargestFree() const;

 private:
  using Free = std::map<int64_t, int64_t>;  // start -> end

  void Cut(Free::iterator piece, int64_t offset, int64_t bytes);

  const int64_t capacity_;
  int64_t used_ = 0;
  int64_t peak_used_ = 0;
  Free free_;  // no two touch
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_EXTENTS_H_
