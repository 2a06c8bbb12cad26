// A limit on bytes per second.
#ifndef CHECKPOINT_FILES_PACE_H_
#define CHECKPOINT_FILES_PACE_H_

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace fsdp::checkpoint {

struct PaceOptions {
  int64_t bytes_per_second = 0;  // 0: no limit
  // Null: never. Read from the thread that writes; once true, it is Cancelled.
  const std::atomic<bool>* cancelled = nullptr;
  // Tests have a time of their own. Null: that of the machine.
  std::function<absl::Time()> now;
  std::function<void(absl::Duration)> sleep;
};

// Thread-compatible.
class Pace {
 public:
  explicit Pace(PaceOptions options);

  // Cancelled, or OK.
  absl::Status CheckCancelled() const;
  // Blocks until what was taken before is paid for. Cancelled.
  absl::Status Take(int64_t bytes);

 private:
  const PaceOptions options_;
  absl::Time free_at_ = absl::InfinitePast();
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_PACE_H_
