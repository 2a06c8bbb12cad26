// Until when a rank waits for others.
#ifndef COMM_GROUP_WAIT_LIMITS_H_
#define COMM_GROUP_WAIT_LIMITS_H_

#include <functional>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace fsdp::comm {

struct WaitLimits {
  absl::Time deadline;
  // Asked again and again: whether the program is to end. Empty: it is not.
  std::function<bool()> stop_requested = nullptr;
  // The time that `deadline` is of; tests have their own.
  std::function<absl::Time()> now = absl::Now;

  bool stopped() const { return stop_requested && stop_requested(); }
  bool passed() const { return now() >= deadline; }
};

}  // namespace fsdp::comm

#endif  // COMM_GROUP_WAIT_LIMITS_H_
