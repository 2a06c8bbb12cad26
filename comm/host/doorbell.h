// Lets ranks wake each other up, by a word in shared memory.
#ifndef COMM_HOST_DOORBELL_H_
#define COMM_HOST_DOORBELL_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace fsdp::comm {

// Lives in zeroed shared memory. One rank waits for it, any rank rings it. A
// waiter reads Count(), checks its own condition, and then sleeps in Await(); a
// ring in between is not missed (futex(2)).
class alignas(64) Doorbell {
 public:
  uint32_t Count() const { return count_.load(std::memory_order_acquire); }

  // Makes a system call only if somebody sleeps.
  void Ring();

  // Returns once Count() is not `seen` or it is `until`; sometimes earlier.
  // Spins for `spin` before it sleeps.
  void Await(uint32_t seen, absl::Duration spin, absl::Time until);

 private:
  std::atomic<uint32_t> count_;
  std::atomic<uint32_t> sleepers_;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free,
              "processes can share no locks");

}  // namespace fsdp::comm

#endif  // COMM_HOST_DOORBELL_H_
