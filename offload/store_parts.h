// Stores have these in common: their errors, an account of which parts are
// taken, and counts of transfers.
#ifndef OFFLOAD_STORE_PARTS_H_
#define OFFLOAD_STORE_PARTS_H_

#include <cstdint>
#include <map>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "offload/param_store.h"

namespace fsdp::offload {

// The errors that all stores return. `what` is the operation on a region of
// `size` bytes.
absl::Status CheckNewRegion(absl::string_view region, int64_t bytes);
absl::Status CheckRange(absl::string_view what, absl::string_view region,
                        int64_t size, int64_t offset, int64_t length);
absl::Status RegionExists(absl::string_view region);
absl::Status CannotRollBack(absl::string_view store);
absl::Status NoSuchRegion(absl::string_view what, absl::string_view region);

// Gives out pieces of [0, capacity), the first that is large enough. A value
// type; thread-compatible.
class Extents {
 public:
  explicit Extents(int64_t capacity);

  // Returns where the piece starts; nothing if no free piece is large enough. 0
  // bytes take no space.
  std::optional<int64_t> Take(int64_t bytes);
  // Takes whole pages for a new region, for which there is room or an error.
  absl::StatusOr<int64_t> TakeFor(absl::string_view region, int64_t bytes);
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

// Counts transfers, and the time during which there are any. Thread-compatible.
class TransferMeter {
 public:
  void Start(absl::Time now) {
    if (running_++ == 0) since_ = now;
  }

  void Finish(absl::Time now, bool well, int64_t bytes) {
    if (--running_ == 0) {
      stats_.busy_seconds += absl::ToDoubleSeconds(now - since_);
    }
    if (!well) return;
    ++stats_.operations;
    stats_.bytes += bytes;
  }

  // Counts transfers that are over.
  const TransferStats& stats() const { return stats_; }

 private:
  int64_t running_ = 0;
  absl::Time since_;
  TransferStats stats_;
};

// Returns the statistics of a store that gives out extents.
inline StoreStats StatsOf(const TransferMeter& reads,
                          const TransferMeter& writes, const Extents& extents) {
  StoreStats stats;
  stats.reads = reads.stats();
  stats.writes = writes.stats();
  stats.capacity_bytes = extents.capacity();
  stats.used_bytes = extents.used();
  stats.peak_used_bytes = extents.peak_used();
  return stats;
}

}  // namespace fsdp::offload

#endif  // OFFLOAD_STORE_PARTS_H_
